"""The process in which a library is really called: one call after the other, on a real device.

Request, JSON as the one argument: ``library``; ``device``; ``skip``, how many calls an earlier process has made;
``subjects``, parts of names, all if empty. Each call is announced before it is made, so that the parent knows which
one ended the process. Answers are lines of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

REFUSALS = (NotImplementedError, ValueError, RuntimeError)
"""What a library raises where it refuses; anything else is an error of its own."""


def serve(request: Mapping[str, Any], tell: Callable[[Mapping[str, Any]], None]) -> None:
    """Make the calls, until a call leaves the device unusable."""
    import torch

    device = str(request["device"])
    calls = import_module(f"conformance.gating.{request['library']}_calls").CALLS
    sm = 0
    if device.startswith("cuda"):
        major, minor = torch.cuda.get_device_capability(torch.device(device))
        sm = 10 * major + minor
    tell({"kind": "device", "sm": sm, "version": str(torch.__version__)})
    for number, ((subject, variant), call) in enumerate(calls.items()):
        if number < request["skip"] or (
            request["subjects"] and not any(word in subject for word in request["subjects"])
        ):
            continue
        tell({"kind": "begin", "number": number, "subject": subject, "variant": variant})
        outcome, detail = _outcome(call, device)
        if outcome != "right" and not _usable(device):
            outcome = "crashed"
        tell({"kind": "end", "outcome": outcome, "detail": detail})
        if outcome == "crashed":
            return
    tell({"kind": "done"})


def _outcome(call: Callable[[str], Any], device: str) -> tuple[str, str]:
    import torch

    try:
        answer, exact = call(device)
        answer = answer.double().cpu()
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        refused = isinstance(error, REFUSALS)
        return ("refused", text) if refused else ("raised", f"{type(error).__name__}: {text}")
    if answer.shape != exact.shape:
        return "wrong", f"shape {tuple(answer.shape)} for {tuple(exact.shape)}"
    bad = ~((answer == exact) | (answer.isnan() & exact.isnan()))
    if not bad.any():
        return "right", ""
    at = tuple(int(i) for i in torch.nonzero(bad)[0])
    return "wrong", f"{int(bad.sum())} of {bad.numel()}; [{at[0]}, {at[1]}] is {answer[at]:g}, exactly {exact[at]:g}"


def _usable(device: str) -> bool:
    import torch

    try:
        return float(torch.ones(4, device=device).sum()) == 4.0
    except Exception:
        return False


def main() -> None:
    """Serve the request; what libraries print goes to stderr."""
    channel = os.dup(1)
    os.dup2(2, 1)

    def tell(message: Mapping[str, Any]) -> None:
        os.write(channel, (json.dumps(message) + "\n").encode())

    serve(json.loads(sys.argv[1]), tell)


if __name__ == "__main__":
    main()
