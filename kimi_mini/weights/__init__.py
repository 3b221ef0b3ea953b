"""The published checkpoint layout: its names, reading and writing it, MXFP4, random weights.

names.py        published tensor <-> region of a parameter; everything else goes through it
inventory.py    every stored tensor of a config, and counts
header.py       the header of a safetensors file
folder.py       the files of a checkpoint and what can be said of them without their data
reading.py      folder -> parameters
writing.py      parameters -> folder, atomically
mxfp4.py        the 4-bit form of the experts
random_init.py  seeded weights
"""

from kimi_mini.weights.header import CheckpointError
from kimi_mini.weights.inventory import Experts, parameter_count, stored_tensors
from kimi_mini.weights.names import parameter_specs
from kimi_mini.weights.random_init import initialise, random_parameters
from kimi_mini.weights.reading import LoadReport, read_checkpoint
from kimi_mini.weights.writing import WriteReport, write_checkpoint

__all__ = [
    "CheckpointError",
    "Experts",
    "LoadReport",
    "WriteReport",
    "initialise",
    "parameter_count",
    "parameter_specs",
    "random_parameters",
    "read_checkpoint",
    "stored_tensors",
    "write_checkpoint",
]
