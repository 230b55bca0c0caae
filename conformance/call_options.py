"""Call options that the harness itself carries out: how a backend is called, never what it should answer.

``stream=side``: on another stream than the default one, which is still busy bringing the inputs when the call is made.
``graph=replay``: the call is captured into a CUDA graph on the inputs of a sister case, then replayed on the real ones.
``inputs=strided``: every matrix among the inputs lies in rows further apart than they are long, garbage between them.

Whatever the options, a sixteenth of the cases is called on memory that has held the sister's inputs (`refilled`).

A sister case has the same sizes and another seed, so that whoever reads inputs too early, or keeps anything of the
capture, answers another question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from conformance.worker_tensors import Buffers, storage_bytes
from fuzz.case import MAX_SEED, Case

CARRIED_OUT: Mapping[str, tuple[str, ...]] = {"stream": ("side",), "graph": ("replay",), "inputs": ("strided",)}
"""Option -> its words; every other option reaches the backend."""
GAP_BYTES = 32
"""Garbage behind each row of a strided input: keeps rows aligned to 16 bytes where they were."""
BUSY_CYCLES = 2_000_000
"""How long the side stream sleeps before it brings the inputs: about a millisecond."""

Parts = Mapping[str, Tensor]


def own_and_carried(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The options that reach the backend, and those that are carried out here. Raises ValueError for other words."""
    carried = {key: word for key, word in options.items() if key in CARRIED_OUT}
    for key, word in carried.items():
        if word not in CARRIED_OUT[key]:
            raise ValueError(f"{key}={word} is none of {', '.join(CARRIED_OUT[key])}")
    return {key: word for key, word in options.items() if key not in carried}, carried


REFILLED = 16
"""Of this many seeds one has its case called on memory that has just held, and been called on, the sister's inputs."""


def is_refilled(case: Case) -> bool:
    """Whether every call of a case is made on refilled memory."""
    return case.seed % REFILLED == 3


def sister(case: Case) -> Case:
    """The case with the next seed."""
    return case.replace(seed=(case.seed + 1) % (MAX_SEED + 1))


def strided(tensor: Tensor) -> Tensor:
    """The same numbers in rows further apart than they are long; vectors and column-major matrices as they are."""
    if tensor.dim() < 2 or tensor.stride(-1) != 1 or not tensor.numel():
        return tensor
    gap = max(1, GAP_BYTES // tensor.element_size())
    *rows, width = tensor.shape
    raw = torch.full(
        (*rows, (width + gap) * tensor.element_size()), 0xFF, dtype=torch.uint8, device=tensor.device
    ).view(tensor.dtype)
    view = raw[..., :width]
    view.copy_(tensor)
    return view


def called(
    call: Callable[[Mapping[str, Tensor]], Any],
    carried: Mapping[str, str],
    inputs: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
    buffers: Buffers,
) -> Any:
    """What ``call(inputs)`` returns under the options ``carried`` on a CUDA device; nothing is synchronised.

    inputs: on the device. others: those of the sister case, of the same shapes. buffers: for the outputs.
    """
    device = next(iter(inputs.values())).device
    real = {name: storage_bytes(tensor).clone() for name, tensor in inputs.items()}
    replay = carried.get("graph") == "replay"
    _copy(inputs, others)
    torch.cuda.synchronize(device)
    if replay:
        return _replayed(call, inputs, real, buffers, device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        _fill(inputs, real)
        parts = call(inputs)
    side.synchronize()
    return parts


def refilled(
    call: Callable[[Mapping[str, Tensor]], Any],
    inputs: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
    buffers: Buffers,
) -> Any:
    """What ``call(inputs)`` returns after a call on the same memory with other inputs in it, on any device.

    Whoever keeps a copy, a transposed weight or a graph by address or shape answers the sister's question.
    """
    real = {name: storage_bytes(tensor).clone() for name, tensor in inputs.items()}
    try:
        _copy(inputs, others)
        with suppress(Exception):  # the sister has no verdict here
            call(inputs)
    finally:
        _fill(inputs, real)
    buffers.poison_again()
    return call(inputs)


def _replayed(
    call: Callable[[Mapping[str, Tensor]], Any],
    inputs: Mapping[str, Tensor],
    real: Mapping[str, Tensor],
    buffers: Buffers,
    device: torch.device,
) -> Any:
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        call(inputs)  # libraries compile and allocate at the first call
    side.synchronize()
    buffers.poison_again()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        parts = call(inputs)
    graph.replay()
    torch.cuda.synchronize(device)
    buffers.poison_again()
    _fill(inputs, real)
    graph.replay()
    torch.cuda.synchronize(device)
    return parts


def _copy(inputs: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    for name, tensor in inputs.items():
        tensor.copy_(others[name])  # a view may start elsewhere in the sister's storage


def _fill(inputs: Mapping[str, Tensor], contents: Mapping[str, Tensor]) -> None:
    for name, tensor in inputs.items():
        storage_bytes(tensor).copy_(contents[name])
