"""Frames round-trip, and no malformed byte gets past the reader."""

import contextlib
import json
import os
import socket
import struct
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.frames import ITEMSIZE, MAGIC, MAX_HEADER, EndOfStreamError, FrameError, read_frame, write_frame
from conformance.messages import Wire


def read_bytes(raw: bytes, **limits: int):
    """What the reader makes of some bytes followed by the end of the stream."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        with theirs, contextlib.suppress(OSError):
            theirs.sendall(raw)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        return read_frame(ours.fileno(), **limits)
    finally:
        ours.close()
        sender.join()


def written(message: dict, tensors: tuple[Wire, ...] = ()) -> bytes:
    source, sink = os.pipe()
    chunks: list[bytes] = []

    def drain() -> None:
        while chunk := os.read(source, 65536):
            chunks.append(chunk)

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        write_frame(sink, message, tensors)
    finally:
        os.close(sink)
        reader.join()
        os.close(source)
    return b"".join(chunks)


def raw_frame(header: bytes, payload: bytes = b"", magic: bytes = MAGIC) -> bytes:
    return struct.pack(">4sI", magic, len(header)) + header + payload


def one_tensor(**changes: object) -> bytes:
    entry = {"name": "x", "dtype": "float32", "shape": [2], "nbytes": 8, **changes}
    return json.dumps({"message": {}, "tensors": [entry]}).encode()


def test_layout_by_hand():
    wire = Wire(name="x", dtype="uint8", shape=(3,), data=b"\x01\x02\x03")
    header = b'{"message":{"id":7},"tensors":[{"name":"x","dtype":"uint8","shape":[3],"nbytes":3}]}'
    assert written({"id": 7}, (wire,)) == b"BSCF" + len(header).to_bytes(4, "big") + header + b"\x01\x02\x03"


@st.composite
def wires(draw: st.DrawFn) -> tuple[Wire, ...]:
    names = draw(st.lists(st.text("abcxyz_:é", min_size=1, max_size=9), unique=True, max_size=4))
    made = []
    for name in names:
        dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
        count = ITEMSIZE[dtype]
        for size in shape:
            count *= size
        made.append(Wire(name=name, dtype=dtype, shape=shape, data=draw(st.binary(min_size=count, max_size=count))))
    return tuple(made)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=4), wires())
def test_round_trip(message: dict, tensors: tuple[Wire, ...]):
    frame = read_bytes(written(message, tensors))
    assert frame.message == message
    assert frame.tensors == tensors


def test_two_frames_follow_each_other():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        write_frame(theirs.fileno(), {"id": 1}, [Wire(name="x", dtype="int16", shape=(2,), data=b"abcd")])
        write_frame(theirs.fileno(), {"id": 2})
        assert read_frame(ours.fileno()).tensors[0].data == b"abcd"
        assert read_frame(ours.fileno()).message == {"id": 2}


def test_a_scalar_has_one_element():
    wire = Wire(name="x", dtype="float64", shape=(), data=bytes(8))
    assert read_bytes(written({}, (wire,))).tensors == (wire,)


def test_a_frame_larger_than_the_socket_buffer():
    wire = Wire(name="x", dtype="uint8", shape=(2**24,), data=os.urandom(2**24))
    assert read_bytes(written({}, (wire,))).tensors[0].data == wire.data


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (raw_frame(b"{}", magic=b"HTTP"), "starts with b'HTTP'"),
        (struct.pack(">4sI", MAGIC, MAX_HEADER + 1), "header of"),
        (raw_frame(b"not json"), "not JSON"),
        (raw_frame(b"\xff\xfe"), "not JSON"),
        (raw_frame(b"[" * 100000), "not JSON"),
        (raw_frame(b"[]"), "not an object"),
        (raw_frame(b'{"message":{}}'), "not an object"),
        (raw_frame(b'{"message":[],"tensors":[]}'), "no object"),
        (raw_frame(b'{"message":{},"tensors":{}}'), "no list"),
        (raw_frame(b'{"message":{},"tensors":[1]}'), "entry"),
        (raw_frame(one_tensor(extra=1)), "entry"),
        (raw_frame(one_tensor(dtype="float31")), "unknown dtype"),
        (raw_frame(one_tensor(dtype=["float32"])), "no string"),
        (raw_frame(one_tensor(nbytes=7)), "cannot have 7 bytes"),
        (raw_frame(one_tensor(nbytes=True)), "no integer"),
        (raw_frame(one_tensor(shape=[2.0])), "no integer"),
        (raw_frame(one_tensor(shape=[-1, -2])), "impossible shape"),
        (raw_frame(one_tensor(shape=[1] * 17, nbytes=4)), "impossible shape"),
        (raw_frame(one_tensor(name="a\nb")), "no name"),
        (raw_frame(one_tensor(shape=[2**40], nbytes=2**42)), "above"),
    ],
)
def test_malformed_frames_are_refused_in_one_line(raw: bytes, words: str):
    with pytest.raises(FrameError, match=words) as caught:
        read_bytes(raw)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, EndOfStreamError)


def test_two_tensors_of_one_name_are_refused():
    entry = {"name": "x", "dtype": "uint8", "shape": [1], "nbytes": 1}
    header = json.dumps({"message": {}, "tensors": [entry, entry]}).encode()
    with pytest.raises(FrameError, match="same name"):
        read_bytes(raw_frame(header, b"ab"))


def test_the_reader_s_own_limit_holds_before_any_payload():
    with pytest.raises(FrameError, match="above 7"):
        read_bytes(raw_frame(one_tensor()), max_payload=7)


WHOLE = raw_frame(one_tensor(), b"12345678")


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 20, len(WHOLE) - 9, len(WHOLE) - 1])
def test_a_cut_frame_is_the_end_of_the_stream(cut: int):
    with pytest.raises(EndOfStreamError, match="ended"):
        read_bytes(WHOLE[:cut])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_a_changed_byte_never_raises_anything_else(place: int, value: int):
    raw = bytearray(WHOLE)
    raw[place] = value
    with contextlib.suppress(FrameError):
        frame = read_bytes(bytes(raw))
        assert len(frame.tensors[0].data) == 8


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        (Wire(name="x", dtype="float32", shape=(2,), data=bytes(7)), "cannot have"),
        (Wire(name="x", dtype="quint8", shape=(2,), data=bytes(2)), "unknown dtype"),
        (Wire(name="x" * 81, dtype="uint8", shape=(2,), data=bytes(2)), "no name"),
    ],
)
def test_the_writer_refuses_the_same(wire: Wire, words: str):
    with pytest.raises(FrameError, match=words):
        written({}, (wire,))


def test_waiting_is_asked_before_each_step_and_may_give_up():
    class GaveUpError(Exception):
        pass

    def give_up(writing: bool) -> None:
        raise GaveUpError(writing)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(GaveUpError) as reading:
            read_frame(ours.fileno(), give_up)
        with pytest.raises(GaveUpError) as writing:
            write_frame(ours.fileno(), {}, (), give_up)
    assert reading.value.args == (False,)
    assert writing.value.args == (True,)
