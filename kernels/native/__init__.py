"""The KDA kernels as C++ operators, compiled on first use.

    build.py       sources → a shared library in the user's cache, one per CPU level and torch
    library.py     whether it is wanted, whether it can be had, and the loaded operators
    operators.py   the operators under the signatures of their torch twins
    csrc/          the mathematics in headers that know no torch, and binding.cpp, which does

The recurrence is a token scan in decode's own arithmetic: prefill, any split of it and decode give
the same bits, every token is a boundary that may be exported (export_alignment 1), and a row's bits
depend neither on its neighbours nor on the number of threads.
"""
