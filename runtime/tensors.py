"""Named tensors as the body of a message: what a weight sync sends.

bf16 and the 8-bit floats, which numpy lacks, travel as their raw bytes under their own dtype code. torch is imported
when the first tensor comes by: a CPU worker that only scores text never loads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from flowrl.errors import WireError

from . import wire
from .body import Body, BodyWriter, Dtype, Field, FieldKind

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]


def encode_tensors(tensors: Tensors, meta: dict[str, Any] | None = None, *, context: str = "tensors") -> wire.Payload:
    """Make named tensors ready to be sent.

    A contiguous tensor in host memory is sent as it lies and must not change until acknowledged: never give live
    weights, give a copy. Others are copied here. Whether a tensor requires a gradient does not travel.

    Args:
        meta: a plain map that travels along.
        context: who sends this to whom; every error begins with it.

    Raises:
        WireError: a value that is no dense tensor of a type in `Dtype`, with its name.
    """
    import torch

    writer = BodyWriter()
    for name, tensor in tensors.items():
        code = _codes().get(tensor.dtype) if isinstance(tensor, torch.Tensor) else None
        if type(name) is not str or code is None or tensor.layout is not torch.strided:
            found = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            wanted = "a dense tensor of floats, ints or bools"
            raise WireError(f"{context}: {name!r} is no tensor that travels", found=found, wanted=wanted)
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        writer.add(name, code, FieldKind.DENSE, tensor.shape, flat.numpy().data)
    header: dict[int, Any] = {wire.Header.NUM_ITEMS.value: len(tensors)}
    if meta:
        header[wire.Header.META.value] = meta
    return writer.payload(header, what=f"{context}: the header")


def decode_tensors(message: wire.Message, frames: Sequence[memoryview]) -> Tensors:
    """The named tensors of a message; views of the frames where these can be written to, copies elsewhere.

    Raises:
        WireError: the message is not one that `encode_tensors` makes.
    """
    body = Body(message, frames)
    tensors = {field.name: _tensor(body, field) for field in body.fields}
    if len(tensors) != len(body.fields):
        raise WireError("a block with two tensors of one name")
    return tensors


def _tensor(body: Body, field: Field) -> torch.Tensor:
    import torch

    dtype = _dtypes()[Dtype(field.dtype)]
    if not field.num_bytes:
        return torch.empty(field.shape, dtype=dtype)
    data = body.bytes_of(field)
    # torch warns at read-only memory, for it cannot keep anyone from writing there.
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype).reshape(field.shape)


@cache
def _dtypes() -> dict[Dtype, torch.dtype]:
    import torch

    return {
        Dtype.BOOL: torch.bool,
        Dtype.U8: torch.uint8,
        Dtype.I8: torch.int8,
        Dtype.I16: torch.int16,
        Dtype.I32: torch.int32,
        Dtype.I64: torch.int64,
        Dtype.F16: torch.float16,
        Dtype.BF16: torch.bfloat16,
        Dtype.F32: torch.float32,
        Dtype.F64: torch.float64,
        Dtype.F8E4M3: torch.float8_e4m3fn,
        Dtype.F8E5M2: torch.float8_e5m2,
        Dtype.U16: torch.uint16,
        Dtype.U32: torch.uint32,
        Dtype.U64: torch.uint64,
    }


@cache
def _codes() -> dict[torch.dtype, Dtype]:
    return {dtype: code for code, dtype in _dtypes().items()}
