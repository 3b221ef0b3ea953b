"""The kernels as C++ operators, compiled on first use.

    build.py       sources → a shared library in the user's cache, one per CPU level and torch
    library.py     whether it is wanted, whether it can be had, and the loaded operators
    operators.py   the KDA core under the signatures of its torch twins
    layers.py      the layer functions under those of theirs
    fakes.py       shapes and dtypes of results, for torch's fake tensors
    csrc/          the mathematics in headers (.h) that know no torch, one idea each, and what ties
                   them to it (.cpp, .hpp)

The recurrence is a token scan in decode's own arithmetic: prefill, any split of it and decode give
the same bits, every token is a boundary that may be exported (export_alignment 1). The scan,
convolution, attention, norms, router and experts give a row bits that depend neither on its
neighbours nor on the number of threads; torch's products of many rows do not promise that.
"""
