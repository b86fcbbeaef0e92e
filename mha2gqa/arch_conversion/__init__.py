"""Models whose class cannot hold fewer KV heads, written as a stock class that computes the same and can.

`plan` decides from config and tensor names alone and returns a `ArchConversion`: the new raw config, and for
every tensor of the result which source tensors it is made of and how. The number of KV heads stays; the
result's own entry in the table does the sharing. `ArchConvertedCheckpoint` is the source seen that way: a checkpoint like
any other to whatever reads it. `written` puts it into a folder, for what must load it as a model.
"""

from .live import arch_converted_model
from .routes import plan
from .tensor_map import ArchConversion, TensorMap
from .tokenizer import carry_tokenizer
from .view import ArchConvertedCheckpoint, as_architecture, shapes_of, write, written

__all__ = [
    "ArchConversion",
    "ArchConvertedCheckpoint",
    "TensorMap",
    "arch_converted_model",
    "as_architecture",
    "carry_tokenizer",
    "plan",
    "shapes_of",
    "write",
    "written",
]
