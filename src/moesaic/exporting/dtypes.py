"""Another dtype for all weights, block by block: memory does not grow with the size of a tensor."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from moesaic.checkpoint.headers import DTYPE_BITS
from moesaic.checkpoint.pieces import ComputedTensor, CopiedTensor, NewTensor, Put, Run, Work
from moesaic.checkpoint.reader import TORCH_DTYPES
from moesaic.checkpoint.writer import OutputTensor
from moesaic.common.errors import MoesaicError
from moesaic.exporting.rows import read_run

CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""`--dtype` -> safetensors code."""

_FLOATS = frozenset({"F64", "F32", "BF16", "F16"})
_BLOCK_BYTES = 4 << 20


def cast_all(tensors: Sequence[NewTensor], dtype: str) -> tuple[list[NewTensor], list[Work]]:
    """The same tensors with every floating-point number rounded to `dtype` (a safetensors code)."""
    made: list[NewTensor] = []
    work: list[Work] = []
    for one in tensors:
        if one.output.dtype not in _FLOATS or one.output.dtype == dtype:
            made.append(one)
            continue
        output = OutputTensor(name=one.output.name, dtype=dtype, shape=one.output.shape)
        if isinstance(one, ComputedTensor):
            made.append(replace(one, output=output, compute=partial(_rounded, one.compute, output)))
        else:
            gap = Run(source=None, start=0, nbytes=output.nbytes)
            made.append(CopiedTensor(output=output, runs=(gap,)))
            work.append(Work(sources=one.sources, run=partial(_cast_runs, one, output)))
    return made, work


def _rounded(compute: Callable[[], Tensor], output: OutputTensor) -> Tensor:
    return _to(compute(), output)


def _cast_runs(tensor: CopiedTensor, output: OutputTensor, put: Put) -> None:
    source = TORCH_DTYPES[tensor.output.dtype]
    itemsize = DTYPE_BITS[tensor.output.dtype] // 8
    position = 0
    for run in tensor.runs:
        for start in range(0, run.nbytes, _BLOCK_BYTES):
            nbytes = min(_BLOCK_BYTES, run.nbytes - start)
            values = torch.frombuffer(read_run(run, start, nbytes), dtype=source)
            put(output.name, position, _to(values, output))
            position += nbytes // itemsize
    assert position == prod(output.shape), output.name


def _to(values: Tensor, output: OutputTensor) -> Tensor:
    made = values.to(TORCH_DTYPES[output.dtype])
    if bool((made.isinf() & values.isfinite()).any()):
        raise MoesaicError(f"{output.name} leaves the range of {output.dtype}; use --dtype bfloat16 or float32")
    return made
