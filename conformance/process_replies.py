"""From a worker's JSON to typed replies; anything malformed is a `FrameError`, since a worker may write nonsense."""

from __future__ import annotations

from typing import Any, get_args

from conformance.frames import Frame, FrameError
from conformance.messages import CallReply, CallStatus, Claimed, Description, JudgeReply

_STATUSES = get_args(CallStatus)


def names(value: Any) -> list[str]:
    """A list of strings."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise FrameError("frame: the answer is no list of strings")
    return value


def call_reply(frame: Frame) -> CallReply:
    """The outcome of a call with the tensors that came beside it."""
    value = _object(frame.message["value"])
    reply = CallReply(
        status=_get(value, "status", str),
        message=_get(value, "message", str),
        input_sha256=_get(value, "input_sha256", str),
        inputs_changed=_get(value, "inputs_changed", bool),
        outputs=frame.tensors,
        seconds=float(_get(value, "seconds", int | float)),
        suspect=_get(value, "suspect", bool),
    )
    if reply.status not in _STATUSES:
        raise FrameError(f"frame: {str(reply.status)[:80]!r} is no status of a call")
    return reply


def judge_reply(frame: Frame) -> JudgeReply:
    """A judgement."""
    value = _object(frame.message["value"])
    parts = _get(value, "parts", list)
    return JudgeReply(input_sha256=_get(value, "input_sha256", str), parts=[_object(part) for part in parts])


def descriptions(value: Any) -> list[Description]:
    """What a source's backends say of themselves."""
    if not isinstance(value, list):
        raise FrameError("frame: the answer is no list of descriptions")
    try:
        return [
            Description(**{**_object(item), "claims": [Claimed(**claim) for claim in _object(item)["claims"]]})
            for item in value
        ]
    except (TypeError, KeyError) as error:
        raise FrameError(f"frame: the answer is no description: {error}") from None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FrameError("frame: expected an object in the answer")
    return value


def _get(value: dict[str, Any], key: str, kind: Any) -> Any:
    item = value.get(key)
    if not isinstance(item, kind) or (isinstance(item, bool) and kind is not bool):
        raise FrameError(f"frame: {key!r} is missing from the answer or of another type")
    return item
