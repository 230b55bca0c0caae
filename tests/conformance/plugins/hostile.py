"""Backends that misbehave, each in one way, when they run; every one claims ``ue8m0 nearest``."""

import contextlib
import ctypes
import importlib.util
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from references.backend import Claim, Unsupported
from references.recipes import Recipe

SOURCE = "tests/conformance/plugins/hostile.py"


class Hostile:
    def __init__(self, name, deed):
        self.name = name
        self._deed = deed

    def version(self):
        return "1.0"

    def claims(self, device):
        return [Claim(operation="ue8m0", variant="nearest", source=SOURCE)]

    def recipe(self, claim):
        return Recipe(source=SOURCE)

    def prepare(self, case, inputs, options):
        return inputs["x"]

    def run(self, prepared, out):
        return self._deed(prepared, out)


def zeros(x, out):
    out["scales"].zero_()
    return out


def segfault(x, out):
    ctypes.string_at(0)


def abort(x, out):
    os.abort()


def exit_zero(x, out):
    os._exit(0)


def kill_itself(x, out):
    os.kill(os.getpid(), signal.SIGKILL)


def system_exit(x, out):
    sys.exit(0)


def interrupt(x, out):
    raise KeyboardInterrupt


def spin(x, out):
    while True:
        pass


def sleep(x, out):
    time.sleep(3600)


def hog(x, out):
    held = []
    while True:
        held.append(bytearray(b"\x01") * (2**24))


def hog_in_a_child(x, out):
    code = "held = []\nwhile True: held.append(bytearray(b'\\x01') * 2**24)"
    subprocess.run([sys.executable, "-I", "-c", code], check=True, start_new_session=False)


def memory_error(x, out):
    return torch.empty(2**60, dtype=torch.uint8)


def shout(x, out):
    for _ in range(64):
        print("A" * 65535)
    os.write(2, b"BSCF" * 4096)
    return zeros(x, out)


def close_all(x, out):
    os.closerange(0, 256)
    return zeros(x, out)


def swap_descriptors(x, out):
    """Every descriptor becomes another file, the channel too."""
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in range(3, 64):
        if descriptor != null:
            os.dup2(null, descriptor)
    return zeros(x, out)


def _channels():
    for descriptor in range(64):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                yield descriptor


def nonsense(x, out):
    for descriptor in _channels():
        os.write(descriptor, b"all is well\n" * 100)
    return zeros(x, out)


def stale(x, out):
    """Repeats an answer to an earlier request before the real one."""
    header = b'{"message":{"id":0,"value":"forged"},"tensors":[]}'
    for descriptor in _channels():
        os.write(descriptor, b"BSCF" + len(header).to_bytes(4, "big") + header)
    return zeros(x, out)


def fork(x, out):
    """Both processes come back."""
    os.fork()
    return zeros(x, out)


def leave_a_child(x, out):
    """The worker dies, while a child still holds its channel."""
    for descriptor in _channels():
        os.set_inheritable(descriptor, True)
    if os.fork() == 0:
        time.sleep(3600)
    os._exit(7)


def die_later(x, out):
    threading.Timer(0.05, lambda: os._exit(9)).start()
    return zeros(x, out)


def write_inputs(x, out):
    x.zero_()
    return zeros(x, out)


def write_beside(x, out):
    flat = out["scales"]
    whole = torch.empty(0, dtype=torch.uint8, device=flat.device).set_(flat.untyped_storage())
    whole[flat.storage_offset() + flat.numel()] = 1
    return zeros(x, out)


def write_before_a_view(x, out):
    """The input itself stays as it is; the storage in front of it does not."""
    torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())[: x.storage_offset()] += 1
    return out


def wrong_shape(x, out):
    return {"scales": torch.zeros(x.numel() + 1, dtype=torch.uint8)}


def wrong_dtype(x, out):
    return {"scales": torch.zeros(x.numel(), dtype=torch.int32)}


def missing(x, out):
    return {}


def extra(x, out):
    return {"scales": zeros(x, out)["scales"], "noise": torch.zeros(1)}


def untouched(x, out):
    return out


def nothing(x, out):
    return None


def not_a_tensor(x, out):
    return {"scales": [0] * x.numel()}


def sparse(x, out):
    return {"scales": torch.zeros(x.numel()).to_sparse()}


def float8(x, out):
    return {"scales": zeros(x, out)["scales"].view(torch.float8_e8m0fnu)}


def refuse(x, out):
    raise Unsupported("not on a Tuesday")


def look_around(x, out):
    """Not hostile: says what a worker has that a foreign interpreter may lack, or should not see."""
    foreign = {"hypothesis", "pandas", "pyarrow", "typer", "rich", "jinja2", "matplotlib", "pytest", "packaging"}
    seen = sorted(foreign & set(sys.modules))
    seen += [name for name in ("tests", "noxfile", "good") if importlib.util.find_spec(name)]
    seen += [path for path in sys.path if path in ("", str(Path.cwd()))]
    raise Unsupported(" ".join(seen) or "nothing but torch and numpy")


def unprintable(x, out):
    class MuteError(Exception):
        def __str__(self):
            raise ValueError("no")

    raise MuteError


def verbose(x, out):
    raise ValueError("first line\nsecond line " + "x" * 10000)


def other_default_dtype(x, out):
    torch.set_default_dtype(torch.float64)
    return zeros(x, out)


def other_default_device(x, out):
    torch.set_default_device("meta")
    return zeros(x, out)


def spoil(x, out):
    """Nothing can be compared in this process any more."""
    torch.equal = None
    return zeros(x, out)


def context_lost(x, out):
    """An index out of range, which a CUDA kernel asserts on: nothing runs in this process's context afterwards."""
    return {"scales": zeros(x, out)["scales"][torch.full_like(x, 10**9, dtype=torch.int64)]}


def device_hog(x, out):
    held = []
    while True:
        held.append(torch.empty(2**32, dtype=torch.uint8, device=x.device))


def device_spin(x, out):
    """The host comes back at once; the device does not."""
    torch.cuda._sleep(2**40)
    return zeros(x, out)


DEEDS = (
    zeros,
    segfault,
    abort,
    exit_zero,
    kill_itself,
    system_exit,
    interrupt,
    spin,
    sleep,
    hog,
    hog_in_a_child,
    memory_error,
    shout,
    close_all,
    swap_descriptors,
    nonsense,
    stale,
    fork,
    leave_a_child,
    die_later,
    write_inputs,
    write_beside,
    wrong_shape,
    wrong_dtype,
    missing,
    extra,
    untouched,
    nothing,
    not_a_tensor,
    sparse,
    float8,
    refuse,
    look_around,
    unprintable,
    verbose,
    other_default_dtype,
    other_default_device,
    spoil,
    context_lost,
    device_hog,
    device_spin,
    write_before_a_view,
)


def backends():
    return [Hostile(deed.__name__, deed) for deed in DEEDS]
