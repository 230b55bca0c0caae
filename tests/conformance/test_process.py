"""A worker answers; whatever a plugin does to it costs one reply, and the next call still works."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conformance import process_watch as watch
from conformance.discover import devices, plugin_source
from conformance.launch import BackendSource, environment
from conformance.messages import CallReply, Wire
from conformance.process import JudgeFailed, Worker, WorkerFailed

PLUGINS = Path(__file__).with_name("plugins")
CASE = "ue8m0 nearest v=1 from=scale n=64 values=wide seed=5"
OTHER = "ue8m0 nearest v=1 from=scale n=33 values=boundary seed=6"
VIEW = "quantize mxfp8 v=1 block=1x32 dtype=bf16 k=64 m=3 scale=ceil stride=offset values=normal seed=7"
RECIPE = {"source": "a test"}
DEADLINE = 30.0
LIMIT = 700 * 2**20
ZEROS = CallReply(status="ok", outputs=(Wire(name="scales", dtype="uint8", shape=(64,), data=bytes(64)),))


def plugin(path: Path) -> BackendSource:
    return BackendSource(kind="plugin_file", location=str(path), name=path.stem)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory):
    with Worker(plugin(PLUGINS / "hostile.py"), log_dir=tmp_path_factory.mktemp("logs")) as worker:
        yield worker


@pytest.fixture(scope="module")
def good():
    with Worker(plugin(PLUGINS / "good.py")) as worker:
        yield worker


@pytest.fixture(scope="module")
def oracle():
    with Worker(None) as worker:
        yield worker


def call(worker: Worker, backend: str, deadline: float = DEADLINE, case: str = CASE, **options: str) -> CallReply:
    return worker.call(case, backend, options, deadline)


def assert_still_works(worker: Worker) -> None:
    reply = call(worker, "zeros")
    assert (reply.status, reply.message, reply.outputs) == ("ok", "", ZEROS.outputs)


def assert_matches(pattern: str, text: str) -> None:
    assert re.match(pattern, text), f"{text!r} does not match {pattern!r}"
    assert text.isprintable()


# What a good backend gets


def test_a_good_backend_conforms(good: Worker, oracle: Worker):
    for case in (CASE, OTHER):
        for poison in ("nan", "finite"):
            reply = call(good, "good", case=case, poison=poison)
            assert (reply.status, reply.message, reply.inputs_changed) == ("ok", "", False)
            judged = oracle.judge(case, RECIPE, reply.outputs, DEADLINE)
            assert judged.input_sha256 == reply.input_sha256
            assert [(part["part"], part["verdict"]) for part in judged.parts] == [("scales", "pass")]


def test_its_description(good: Worker):
    (description,) = good.describe()
    assert (description.backend, description.version, description.device) == ("good", "1.0", "cpu")
    assert (description.sm, description.pace) == ("", 1.0)
    assert description.interpreter == good.interpreter
    assert description.interpreter.startswith(f"CPython {sys.version.split()[0]}, torch ")
    (claimed,) = description.claims
    assert (claimed.claim["operation"], claimed.claim_text, claimed.recipe_text) == ("ue8m0", "n<=4096", "default")
    assert "torch" in description.libraries


def test_a_refusal_carries_its_reason(good: Worker):
    reply = call(good, "good", case=CASE.replace("n=64", "n=5000"))
    assert (reply.status, reply.message) == ("refused", "n above 4096")


def test_the_worker_is_isolated_and_shielded(good: Worker):
    good.describe()
    proc = Path(f"/proc/{good.pid}")
    variables = dict(entry.split("=", 1) for entry in (proc / "environ").read_text().split("\0") if entry)
    assert not [name for name in variables if name.startswith("PYTHON")]
    assert variables["OMP_NUM_THREADS"] == "1"
    assert os.getsid(good.pid) == good.pid != os.getsid(0)
    assert (proc / "oom_score_adj").read_text().strip() == "1000"
    assert (proc / "fd/0").readlink() == Path("/dev/null")
    assert (proc / "fd/1").readlink() == (proc / "fd/2").readlink() == good.log


def test_a_worker_needs_and_sees_little(hostile: Worker):
    assert call(hostile, "look_around").message == "nothing but torch and numpy"


def test_an_environment_differs_in_path_thread_limits_and_python_variables_only():
    base = {"PATH": "/bin", "PYTHONPATH": "/x", "PYTHONHASHSEED": "1", "CUDA_VISIBLE_DEVICES": "3"}
    assert environment(base, "/v/bin/python", None) == {"PATH": "/v/bin:/bin", "CUDA_VISIBLE_DEVICES": "3"}
    limited = environment({**base, "OMP_NUM_THREADS": "8"}, "/v/bin/python", 2)
    assert (limited["OMP_NUM_THREADS"], limited["MKL_NUM_THREADS"], limited["CUDA_VISIBLE_DEVICES"]) == ("2", "2", "3")


# What hostile ones cost

DEATHS = {
    "segfault": ("crash", r"killed by SIGSEGV; log: .*Fatal Python error: Segmentation fault in string_at \("),
    "abort": ("crash", r"killed by SIGABRT; log: .*Fatal Python error: Aborted in abort \(hostile.py:"),
    "exit_zero": ("crash", r"exited with status 0 and no answer"),
    "kill_itself": ("crash", r"killed by SIGKILL, not by the harness"),
    "close_all": ("crash", r"closed the channel to its parent"),
    "swap_descriptors": ("crash", r"closed the channel to its parent"),
    "nonsense": ("crash", r"protocol: frame: starts with b'all '"),
    "leave_a_child": ("crash", r"exited with status 7 and no answer"),
    "hog": ("oom", r"used \d\.\d\d GiB, the limit is 0\.68 GiB"),
    "hog_in_a_child": ("oom", r"used \d\.\d\d GiB, the limit is 0\.68 GiB"),
}


HANGS = ("spin", "sleep")


@pytest.fixture(scope="module")
def fates() -> dict[str, tuple[CallReply, int | None, CallReply]]:
    """deed -> its reply, the process left behind by it, the reply to the next call; two workers share the deeds."""

    def suffer(deeds: list[str]) -> dict[str, tuple[CallReply, int | None, CallReply]]:
        fates = {}
        with Worker(plugin(PLUGINS / "hostile.py"), memory_limit=LIMIT) as worker:
            for deed in deeds:
                worker.describe()  # the deadline of a hang starts in a running process
                reply = call(worker, deed, deadline=0.4 if deed in HANGS else DEADLINE)
                fates[deed] = (reply, worker.pid, call(worker, "zeros"))
        return fates

    deeds = [*DEATHS, *HANGS]
    with ThreadPoolExecutor(2) as pool:
        halves = pool.map(suffer, (deeds[::2], deeds[1::2]))
        return {deed: fate for half in halves for deed, fate in half.items()}


@pytest.mark.parametrize("deed", DEATHS)
def test_a_death_costs_one_reply(fates: dict, deed: str):
    reply, pid, following = fates[deed]
    status, message = DEATHS[deed]
    assert reply.status == status
    assert_matches(message, reply.message)
    assert reply.outputs == ()
    assert pid is None
    assert following == dataclasses.replace(ZEROS, input_sha256=following.input_sha256, seconds=following.seconds)


@pytest.mark.parametrize("deed", HANGS)
def test_a_hang_ends_at_its_deadline_and_names_the_place(fates: dict, deed: str):
    reply, pid, following = fates[deed]
    assert reply.status == "hang"
    assert_matches(rf"no answer within 0\.4 s, in {deed} \(hostile\.py:\d+\)", reply.message)
    assert reply.seconds >= 0.4
    assert pid is None
    assert following.status == "ok"


SURVIVALS = {
    "system_exit": ("error", r"SystemExit: 0 \(in system_exit, hostile\.py:\d+\)$"),
    "interrupt": ("error", r"KeyboardInterrupt \(in interrupt, hostile\.py:\d+\)$"),
    "memory_error": ("oom", r"RuntimeError: .*memory"),
    "nothing": ("error", r"run\(\) returned a NoneType, not a mapping"),
    "not_a_tensor": ("error", r"run\(\) returned scales, which is a list, not a tensor$"),
    "sparse": ("error", r"run\(\) returned scales, which is not a plain dense tensor$"),
    "refuse": ("refused", r"not on a Tuesday$"),
    "unprintable": ("error", r"MuteError: \(its text raises ValueError\) \(in unprintable, "),
    "verbose": ("error", r"ValueError: first line second line x{20}.*\.\.\. \(in verbose, "),
    "write_beside": ("error", r"wrote outside the buffer of scales: 0 bytes before it, 1 behind it$"),
    "shout": ("ok", r"$"),
    "stale": ("ok", r"$"),
    "fork": ("ok", r"$"),
}


@pytest.mark.parametrize("deed", SURVIVALS)
def test_the_process_survives_what_does_not_kill_it(hostile: Worker, deed: str):
    assert_still_works(hostile)
    pid = hostile.pid
    status, message = SURVIVALS[deed]
    reply = call(hostile, deed)
    assert reply.status == status
    assert_matches(message, reply.message)
    assert_still_works(hostile)
    assert hostile.pid == pid


def test_a_death_between_calls_is_noticed_and_costs_nothing(hostile: Worker):
    assert call(hostile, "die_later").status == "ok"
    time.sleep(0.3)
    assert_still_works(hostile)
    assert hostile.died_idle.startswith("exited with status 9 and no answer")


def test_inputs_that_are_written_are_reported_and_made_anew(hostile: Worker):
    before = call(hostile, "zeros")
    reply = call(hostile, "write_inputs")
    assert (reply.status, reply.inputs_changed) == ("ok", True)
    after = call(hostile, "zeros")
    assert (after.inputs_changed, after.input_sha256) == (False, before.input_sha256)
    assert before.input_sha256 == reply.input_sha256


def test_a_write_beside_a_view_counts_as_one_to_the_input(hostile: Worker):
    assert not call(hostile, "untouched", case=VIEW).inputs_changed
    reply = call(hostile, "write_before_a_view", case=VIEW)
    assert (reply.status, reply.inputs_changed) == ("ok", True)


def test_another_default_dtype_does_not_reach_the_next_inputs(hostile: Worker):
    before = call(hostile, "zeros", case=OTHER)
    call(hostile, "other_default_dtype")
    assert call(hostile, "zeros", case=OTHER).input_sha256 == before.input_sha256


def test_another_default_device_does_not_reach_the_next_inputs(hostile: Worker):
    before = call(hostile, "zeros", case=OTHER)
    reply = call(hostile, "other_default_device")
    assert (reply.status, reply.message) == ("ok", "")
    assert call(hostile, "zeros", case=OTHER).input_sha256 == before.input_sha256


HOMELY = """
import torch
torch.set_default_device("meta")
from {module} import Hostile
def where(x, out):
    assert torch.zeros(1).device.type == "meta"
    out["scales"].zero_()
    return out
def backends():
    return [Hostile("where", where)]
"""


def test_a_default_device_that_a_source_sets_is_in_force_in_its_own_calls_only(tmp_path: Path):
    (tmp_path / "hostile.py").write_text((PLUGINS / "hostile.py").read_text())
    (tmp_path / "homely.py").write_text(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{HOMELY.format(module='hostile')}"
    )
    with Worker(plugin(tmp_path / "homely.py")) as worker:
        for _ in range(2):
            reply = call(worker, "where")
            assert (reply.status, reply.message, reply.outputs) == ("ok", "", ZEROS.outputs)


def test_a_process_that_a_backend_has_spoiled_costs_one_reply(hostile: Worker):
    reply = call(hostile, "spoil")
    assert (reply.status, reply.suspect, hostile.pid) == ("crash", True, None)
    assert_matches(r"its process is spoiled: after the call the harness's own work failed there: Typ", reply.message)
    assert_still_works(hostile)


def test_a_source_that_does_not_start_again_costs_its_calls_and_nothing_else(tmp_path: Path):
    mark = f"mark = pathlib.Path({str(tmp_path / 'mark')!r})"
    once = f"import pathlib\n{mark}\nif mark.exists():\n    raise OSError('in use')\nmark.touch()\n"
    (tmp_path / "once.py").write_text(once + (PLUGINS / "hostile.py").read_text())
    with Worker(plugin(tmp_path / "once.py")) as worker:
        assert_still_works(worker)
        assert call(worker, "exit_zero").status == "crash"
        reply = call(worker, "zeros")
        assert (reply.status, reply.suspect) == ("crash", False)
        assert_matches(
            r"does not start again: plugin once\.py: OSError: in use \(in <module>, once\.py:", reply.message
        )


@pytest.mark.parametrize(("poison", "byte"), [("nan", 0xFF), ("finite", 0x5A)])
def test_an_unwritten_buffer_comes_back_poisoned(hostile: Worker, poison: str, byte: int):
    reply = call(hostile, "untouched", poison=poison)
    assert reply.outputs[0].data == bytes([byte]) * 64


@pytest.mark.parametrize(
    ("deed", "parts"),
    [
        ("wrong_shape", [("scales", "wrong", "shape [65], expected [64]")]),
        ("wrong_dtype", [("scales", "wrong", "dtype int32, expected uint8")]),
        ("missing", [("scales", "wrong", "the part is missing")]),
        ("extra", [("scales", "wrong", ""), ("noise", "wrong", "no such part in the contract; it has scales")]),
        ("untouched", [("scales", "wrong", "")]),
        ("float8", [("scales", "wrong", "")]),
    ],
)
def test_outputs_of_the_wrong_form_are_wrong(hostile: Worker, oracle: Worker, deed: str, parts: list):
    reply = call(hostile, deed)
    assert reply.status == "ok"
    judged = oracle.judge(CASE, RECIPE, reply.outputs, DEADLINE)
    assert [(part["part"], part["verdict"]) for part in judged.parts] == [part[:2] for part in parts]
    for part, (_, _, message) in zip(judged.parts, parts, strict=True):
        assert part["message"].startswith(message)


def on_cuda(worker: Worker, deed: str, deadline: float = 60.0) -> CallReply:
    worker.describe()
    return call(worker, deed, deadline=deadline)


@pytest.mark.gpu
@pytest.mark.skipif(devices() == ["cpu"], reason="no CUDA device")
def test_a_device_s_faults_cost_one_reply_each():
    with Worker(plugin(PLUGINS / "hostile.py"), "cuda:0") as worker:
        (description, *_) = worker.describe()
        assert description.sm.isdecimal()
        assert {"cuda", "driver"} <= set(description.libraries)
        assert_still_works(worker)
        pid = worker.pid
        reply = on_cuda(worker, "device_hog")
        assert (reply.status, worker.pid) == ("oom", pid)
        assert_still_works(worker)
        reply = on_cuda(worker, "context_lost")
        assert reply.status == "crash"
        assert_matches(r"device context lost: \w+: CUDA error: device-side assert", reply.message)
        assert worker.pid is None
        assert_still_works(worker)
        reply = on_cuda(worker, "device_spin", deadline=1.0)
        assert reply.status == "hang"
        assert_matches(r"no answer within 1 s, in synchronize \(", reply.message)
        assert_still_works(worker)
        assert on_cuda(worker, "write_inputs").inputs_changed
        assert on_cuda(worker, "write_beside").message.startswith("wrote outside the buffer of scales")
        assert_still_works(worker)


# When even the parent's side goes wrong


def test_an_unknown_backend_is_the_harness_s_fault(hostile: Worker):
    with pytest.raises(WorkerFailed, match="offers no backend 'nobody'"):
        call(hostile, "nobody")
    with pytest.raises(WorkerFailed, match="poison=red is none of nan, finite"):
        call(hostile, "zeros", poison="red")


def test_the_oracle_s_failures_are_told(oracle: Worker):
    with pytest.raises(JudgeFailed, match="unknown operation") as failure:
        oracle.judge("nonsense x v=1 seed=1", RECIPE, (), DEADLINE)
    assert failure.value.status == "error"
    with pytest.raises(JudgeFailed, match="unknown dtype"):
        oracle.judge(CASE, RECIPE, [Wire(name="scales", dtype="decimal", shape=(1,), data=b"1")], DEADLINE)
    with pytest.raises(JudgeFailed) as failure:
        oracle.judge(CASE.replace("n=64", "n=4000000"), RECIPE, (), 0.01)
    assert failure.value.status == "hang"
    assert oracle.judge(CASE, RECIPE, (), DEADLINE).parts[0]["message"] == "the part is missing"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_library", r"plugin p\.py: ModuleNotFoundError: No module named 'no_such_library' \(in "),
        ("import ctypes\nctypes.string_at(0)", r"plugin p\.py: cannot start: killed by SIGSEGV; .*Segmentation fault"),
    ],
)
def test_a_plugin_that_fails_at_import_fails_in_one_line(tmp_path: Path, text: str, words: str):
    (tmp_path / "p.py").write_text(text)
    with Worker(plugin(tmp_path / "p.py")) as worker, pytest.raises(WorkerFailed) as failure:
        worker.describe()
    assert_matches(words, str(failure.value))


def test_a_plugin_module_outside_site_packages_is_importable_in_the_worker(tmp_path: Path):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/good.py").write_text((PLUGINS / "good.py").read_text())
    (tmp_path / "ours/mine.py").write_text("from .good import backends\nfrom ours.good import SOURCE\n")
    with Worker(plugin_source("ours.mine", folder=tmp_path)) as worker:
        assert [description.backend for description in worker.describe()] == ["good"]


def test_an_interpreter_without_torch_fails_in_one_line(tmp_path: Path):
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys._base_executable} -S "$@"\n')
    (tmp_path / "python").chmod(0o755)
    with Worker(None, python=str(tmp_path / "python")) as worker, pytest.raises(WorkerFailed) as failure:
        worker.devices()
    assert_matches(r"oracle: cannot start: exited with status 1 .*No module named '(numpy|torch)'", str(failure.value))


def test_a_missing_interpreter_fails_in_one_line(tmp_path: Path):
    with Worker(None, python=str(tmp_path / "python")) as worker, pytest.raises(WorkerFailed, match="cannot start"):
        worker.devices()


def test_closing_from_another_thread_ends_a_call(tmp_path: Path):
    worker = Worker(plugin(PLUGINS / "hostile.py"), log_dir=tmp_path)
    assert_still_works(worker)
    replies: list[CallReply] = []
    caller = threading.Thread(target=lambda: replies.append(call(worker, "sleep")))
    caller.start()
    time.sleep(0.2)
    worker.close()
    caller.join(5)
    assert [(reply.status, reply.message) for reply in replies] == [("crash", "the worker was closed")]
    with pytest.raises(WorkerFailed, match="closed"):
        call(worker, "zeros")


class TooLateError(Exception):
    pass


def test_an_interrupted_request_leaves_no_process(hostile: Worker):
    def interrupt(number: int, frame: object) -> None:
        raise TooLateError

    hostile.describe()
    pid = hostile.pid
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TooLateError):
            call(hostile, "sleep")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert hostile.pid is None
    assert watch.resident_bytes(pid) == 0


PARENT = """
import sys
from pathlib import Path
from conformance.discover import devices
from conformance.launch import BackendSource
from conformance.process import Worker
assert "torch" not in sys.modules and "numpy" not in sys.modules
worker = Worker(BackendSource(kind="plugin_file", location=sys.argv[1], name="hostile"))
worker.describe()
print(worker.pid, flush=True)
worker.call(sys.argv[2], "spin", {}, 60.0)
"""


def test_workers_die_with_their_parent_which_never_imports_torch():
    arguments = [sys.executable, "-c", PARENT, str(PLUGINS / "hostile.py"), CASE]
    root = Path(__file__).parents[2]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    for _ in range(100):
        if watch.resident_bytes(pid) == 0:
            break
        time.sleep(0.05)
    assert watch.resident_bytes(pid) == 0


# Looking from outside


def test_a_fatal_error_is_summarised_with_its_place_and_what_came_before():
    log = (
        "loading\nfree(): invalid pointer\nFatal Python error: Aborted\n\n"
        'Current thread 0x00007f (most recent call first):\n  File "/a/b/mine.py", line 12 in run\n'
        '  File "/a/worker.py", line 3 in call\n\nExtension modules: numpy (total: 1)\n'
    )
    assert watch.summary(log) == "free(): invalid pointer | Fatal Python error: Aborted in run (mine.py:12)"


def test_other_logs_are_summarised_by_their_last_lines():
    assert watch.summary("one\n\ntwo\nthree\x1b[0m\nfour\n") == "two | three [0m | four"
    assert watch.summary("") == ""
    assert len(watch.summary("x" * 5000)) == watch.MAX_LINE


@pytest.mark.parametrize(
    ("status", "text"),
    [(-11, "killed by SIGSEGV"), (0, "exited with status 0 and no answer"), (-63, "killed by signal 63")],
)
def test_the_way_a_process_ended(status: int, text: str):
    assert watch.exit_text(status) == text


def test_own_session_and_memory_are_seen():
    assert os.getpid() in watch.session_members(os.getsid(0))
    assert os.getpid() in watch.recent_members(os.getsid(0), 0.0)
    assert watch.resident_bytes(os.getpid()) > 2**20
    assert watch.resident_bytes(2**22 + 1) == 0


def test_one_look_at_the_processes_serves_for_a_while() -> None:
    before = watch.recent_members(os.getsid(0), 0.0)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert watch.recent_members(os.getsid(0), 1e9) == before
        assert child.pid in watch.recent_members(os.getsid(0), 0.0)
    finally:
        child.communicate(b"\n")
