"""`kpool doctor`: is this installation sound, and if not, what to do about it."""

from __future__ import annotations

import platform
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import _versions, reference

# MAX is imported inside the checks: a broken one must be a line of the report.
if TYPE_CHECKING:
    from max.driver import Device


class Problem(Exception):
    """A check found something off."""


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        subject: What is looked at.
        run: Returns what it finds; any exception is a problem.
        remedy: What to do about a problem.
        for_ops: Whether the ops need it; if not, a problem is a note.
    """

    subject: str
    run: Callable[[], str]
    remedy: str
    for_ops: bool = True


def run_doctor() -> int:
    """Runs every check and prints what each finds.

    Returns:
        0 if all is well, else 1.
    """
    causes: set[str] = set()
    for check in _CHECKS:
        try:
            _print("ok", f"{check.subject}: {check.run()}")
        except Exception as error:
            cause = str(error) or repr(error)
            if not check.for_ops:
                _print("note", f"{check.subject}: {cause}")
                _print("", f"-> {check.remedy}")
                continue
            if cause in causes:
                _print("skipped", f"{check.subject}: for the reason above")
            else:
                _print("problem", f"{check.subject}: {cause}")
                _print("", f"-> {check.remedy}")
            causes.add(cause)
    if causes:
        print(f"Problems found: {len(causes)}")
        return 1
    print("All is well.")
    return 0


def _print(mark: str, text: str) -> None:
    indent = " " * 9
    print(f"{mark:<9}" + text.replace("\n", "\n" + indent), flush=True)


def _check_max() -> str:
    from max.engine import __version__ as found

    if found != _versions.MAX_VERSION:
        raise Problem(f"this package is for {_versions.MAX_VERSION}, found {found}")
    return str(found)


def _check_mojo() -> str:
    from . import _library

    found = _library.mojo_version()
    if _versions.MOJO_VERSION not in found.split():
        raise Problem(f"this package is for {_versions.MOJO_VERSION}, found {found}")
    return found


def _check_c_compiler() -> str:
    # The only name that Mojo looks for.
    if found := shutil.which("cc"):
        return found
    raise Problem(
        "there is no cc on PATH, with which MAX builds parts of max.nn;\n"
        "kpool_graph.nn, max serve and the tests need it, the ops do not"
    )


def _devices() -> list[Device]:
    from max.driver import CPU, Accelerator, accelerator_count

    return [CPU(), *(Accelerator(index) for index in range(accelerator_count()))]


def _name(device: Device) -> str:
    if device.is_host:
        return device.label
    return f"{device.label}:{device.id} ({device.api}, {device.architecture_name})"


def _check_devices() -> str:
    return ", ".join(_name(device) for device in _devices())


def _check_sources() -> str:
    from . import _library

    return str(_library.source_dir())


def _check_library() -> str:
    from . import _library

    return str(_library.kernels_path())


def _check_ops() -> str:
    from max.graph import KernelLibrary

    from . import _library

    names = _library.registered_ops()
    if not names:
        raise Problem("the kernels register none")
    # MAX has ops of some of these names itself; only what we add counts.
    added = Counter(KernelLibrary([_library.kernels_path()])) - Counter(KernelLibrary())
    if missing := [name for name in names if name not in added]:
        raise Problem(f"not registered: {', '.join(missing)}")
    return ", ".join(names)


def _check_results() -> str:
    # Looked up first: without kernels there is nothing to wait for.
    _check_library()
    _print("", "Running both ops. The first run compiles for about 20 seconds.")
    # One GPU stands for all of its kind.
    devices = _devices()[:2]
    for device in devices:
        _compare_with_reference(device)
    return f"both ops agree with NumPy on {', '.join(map(_name, devices))}"


def _compare_with_reference(device: Device) -> None:
    """Prefills 6 and 5 tokens, decodes 3 more each: pool 1 closes in both.

    Raises:
        Problem: If a pooled key, a pool id or the ring is wrong.
    """
    from max.dtype import DType
    from max.engine import InferenceSession
    from max.graph import DeviceRef, Graph, TensorType

    from . import TailRing, _library, seed_tail, tail_update, to_buffer, to_numpy

    kpool, head_dim = 4, 128
    ring = TailRing(3, kpool, head_dim, DType.float32)
    offsets = np.array([0, 6, 11])
    positions = np.array([[6, 7, 8], [5, 6, 7]])
    slots = np.array([2, 0])
    random = np.random.default_rng(seed=0)
    k, gate = random.normal(size=(2, 11, head_dim)).astype(np.float32)
    next_k, next_gate = random.normal(size=(2, 2, 3, head_dim)).astype(np.float32)
    ape = random.normal(size=(kpool, head_dim)).astype(np.float32)

    operands = [
        (k, DType.float32),
        (gate, DType.float32),
        (offsets, DType.uint32),
        (np.zeros(2), DType.uint32),
        (slots, DType.uint32),
        (next_k, DType.float32),
        (next_gate, DType.float32),
        (ape, DType.float32),
        (positions, DType.int32),
    ]
    where = DeviceRef.from_device(device)
    types = [TensorType(dtype, value.shape, where) for value, dtype in operands]
    with Graph("self_check", input_types=[ring.buffer_type(where), *types]) as graph:
        buffer = graph.inputs[0].buffer
        tensors = [each.tensor for each in graph.inputs[1:]]
        prefill = tensors[:5]
        decode = [*tensors[5:], prefill[-1]]
        seed_tail(buffer, *prefill, kpool=kpool)
        graph.output(*tail_update(buffer, *decode, kpool=kpool))
    model = InferenceSession(devices=[device]).load(
        graph, custom_extensions=[_library.kernels_path()]
    )
    tail = ring.allocate(device)
    outputs = model.execute(
        tail, *(to_buffer(value, dtype, device) for value, dtype in operands)
    )
    pooled, closed_pool = (to_numpy(each) for each in outputs)

    expected = np.zeros(ring.shape, np.float32)
    reference.seed_tail(expected, k, gate, offsets, np.zeros(2), slots, kpool=kpool)
    exact, pools = reference.tail_update(
        expected, next_k, next_gate, ape, positions, slots, kpool=kpool
    )
    if not np.array_equal(closed_pool, pools):
        raise Problem(f"tail_update closed the wrong pools on {_name(device)}")
    for row in range(len(slots)):
        prompt = slice(offsets[row], offsets[row + 1])
        keys = np.concatenate([k[prompt], next_k[row]])[kpool : 2 * kpool]
        gates = np.concatenate([gate[prompt], next_gate[row]])[kpool : 2 * kpool]
        ulp = reference.ulp(exact[row, 0], pooled.dtype)
        tolerance = reference.pool_tolerance(keys, gates, ape, ulp)
        if not np.all(np.abs(pooled[row, 0] - exact[row, 0]) <= tolerance):
            raise Problem(f"a pooled key is wrong on {_name(device)}")
    if to_numpy(tail).tobytes() != expected.tobytes():
        raise Problem(f"the ring is wrong on {_name(device)}")


_INSTALL_MAX = f"pip install max=={_versions.MAX_VERSION}"
_KERNELS = (
    "reinstall kpool_graph; if KPOOL_GRAPH_KERNELS is set, unset it or let it name a"
    " folder of its kernels"
)
_CHECKS = (
    Check("kpool_graph", lambda: _versions.__version__, ""),
    Check("Python", platform.python_version, ""),
    Check("NumPy", lambda: np.__version__, ""),
    Check("MAX", _check_max, _INSTALL_MAX),
    Check(
        "Mojo",
        _check_mojo,
        f"{_INSTALL_MAX}, which brings Mojo {_versions.MOJO_VERSION}",
    ),
    Check(
        "C compiler",
        _check_c_compiler,
        "install gcc or clang, and the C library's development files",
        for_ops=False,
    ),
    Check("devices", _check_devices, _INSTALL_MAX),
    Check("kernel sources", _check_sources, _KERNELS),
    Check("compiled kernels", _check_library, _KERNELS),
    Check("ops", _check_ops, _KERNELS),
    Check(
        "self-check",
        _check_results,
        "if the versions above are right, this is a bug: report it with this output",
    ),
)
