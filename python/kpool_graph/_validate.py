"""Checks made while a graph is built: the only place that words their errors."""

from __future__ import annotations

from collections.abc import Sequence

from max.dtype import DType
from max.graph import BufferValue, DeviceRef, Dim, StaticDim, TensorValue

RING_DTYPES = (DType.float32, DType.float16, DType.bfloat16)
RING_AXES: tuple[str, ...] = ("max_slots", "2", "ring_len", "head_dim")
PLANES = 2
_WHEN = "must be known while the graph is built"


class OperandError(ValueError, TypeError):
    """An op was given operands it cannot take.

    Both a ValueError and a TypeError: one call may have problems of either
    kind, and all of them are reported together.
    """


class Problems:
    """Collects what is wrong with one call, to raise it all at once."""

    def __init__(self, op: str) -> None:
        """Starts with no problem.

        Args:
            op: Name that opens each message.
        """
        self._op = op
        self._messages: list[str] = []
        self._sizes: dict[str, Dim] = {}
        self._dtypes: tuple[DType, ...] = RING_DTYPES
        self._device: DeviceRef | None = None
        self._device_owner = "the ring"

    def add(self, message: str) -> None:
        """Notes one problem.

        Args:
            message: Operand, what it must be, what it is.
        """
        self._messages.append(f"{self._op}: {message}")

    def raise_if_any(self) -> None:
        """Ends the check.

        Raises:
            OperandError: If anything was noted, one line a problem.
        """
        if self._messages:
            raise OperandError("\n".join(self._messages))

    def require_at_least(self, name: str, value: int, least: int) -> None:
        """Notes a size that is too small.

        Args:
            name: Name of the size.
            value: Its value.
            least: The smallest value allowed.
        """
        if value < least:
            self.add(f"{name} must be at least {least}, got {value}")

    def require_multiple(self, name: str, value: int, of: str, unit: int) -> None:
        """Notes a size that another does not divide.

        Args:
            name: Name of the size.
            value: Its value.
            of: Name of the other.
            unit: Its value. Below 1 is another check's to note.
        """
        if unit >= 1 and value % unit:
            self.add(f"{name} ({value}) must be a multiple of {of} ({unit})")

    def require_ring_len(self, ring_len: int, kpool: int) -> None:
        """Notes a ring that cannot hold one pool.

        Args:
            ring_len: Entries per slot.
            kpool: Tokens per pool.
        """
        if ring_len < kpool:
            self.add(f"ring_len ({ring_len}) must be at least kpool ({kpool})")

    def require_dtype(self, name: str, dtype: DType, allowed: Sequence[DType]) -> None:
        """Notes a dtype that is not among those allowed.

        Args:
            name: What has the dtype.
            dtype: The dtype it has.
            allowed: The dtypes it may have.
        """
        if dtype not in allowed:
            wanted = " or ".join(each.name for each in allowed)
            self.add(f"{name} must be {wanted}, got {dtype.name}")

    def expect(self, dtype: DType, device: DeviceRef, **sizes: int) -> None:
        """Takes what a module fixed as known, before any operand.

        Args:
            dtype: Dtype of the ring and of what has the ring's dtype.
            device: Device of every operand.
            **sizes: Sizes by axis name.
        """
        self._dtypes = (dtype,)
        self._device, self._device_owner = device, "the module"
        self._sizes.update((axis, Dim(size)) for axis, size in sizes.items())

    def require_ring(self, tail: object, kpool: int | None = None) -> None:
        """Notes what is wrong with the ring, and takes its sizes as known.

        Args:
            tail: The operand.
            kpool: Tokens per pool; if not given, any ring_len will do and several
                rings may be stacked.
        """
        axes = RING_AXES
        if kpool is not None:
            self.require_at_least("kpool", kpool, 1)
            self._sizes["kpool"] = Dim(kpool)
        elif isinstance(tail, BufferValue):
            axes = ("rings",) * (tail.rank - len(RING_AXES)) + RING_AXES
        whole = self.require_buffer("tail", tail, axes)
        if not isinstance(tail, BufferValue):
            return
        if tail.dtype in self._dtypes:
            self._dtypes = (tail.dtype,)
        if not whole:
            return
        planes = tail.shape[-3]
        if planes != PLANES:
            self.add(f"tail.shape[{tail.rank - 3}] must be {PLANES}, got {planes}")
        size = self.require_static("ring_len", 1)
        if size and kpool is not None:
            self.require_ring_len(size, kpool)
        self.require_static("head_dim", 1)

    def require_keys(self, k: object, kpool: int) -> None:
        """Takes the dtype and device of an op without a ring from its keys.

        Args:
            k: The operand.
            kpool: Tokens per pool.
        """
        self.require_at_least("kpool", kpool, 1)
        self._sizes["kpool"] = Dim(kpool)
        if isinstance(k, TensorValue) and k.dtype in RING_DTYPES:
            self._dtypes = (k.dtype,)

    def require_tensor(
        self,
        name: str,
        value: object,
        axes: Sequence[str],
        dtype: DType | None = None,
    ) -> None:
        """Notes what is wrong with one tensor operand.

        Args:
            name: Name of the operand.
            value: The operand.
            axes: The name of each axis's size. Axes of one name must agree,
                across operands too, as far as the graph knows their sizes; the
                kernels compare the rest.
            dtype: The dtype it must have; the ring's if not given.
        """
        if not isinstance(value, TensorValue):
            self.add(f"{name} must be a graph tensor, got {_describe(value)}")
            return
        self._require_type(name, value, axes, (dtype,) if dtype else self._dtypes)

    def require_offsets(self, name: str, value: object, lengths: object) -> None:
        """Notes what is wrong with row offsets.

        Args:
            name: Name of the operand.
            value: The operand, one entry longer than the batch.
            lengths: An operand that has an entry a request.
        """
        if isinstance(lengths, TensorValue) and lengths.rank == 1:
            batch = lengths.shape[0]
            if isinstance(batch, StaticDim):
                self._sizes["batch + 1"] = Dim(int(batch) + 1)
        self.require_tensor(name, value, ("batch + 1",), DType.uint32)

    def require_buffer(self, name: str, value: object, axes: Sequence[str]) -> bool:
        """Notes what is wrong with one buffer of the ring's dtype.

        Args:
            name: Name of the operand.
            value: The operand.
            axes: As for a tensor.

        Returns:
            Whether it is a buffer of that rank.
        """
        if not isinstance(value, BufferValue):
            self.add(
                f"{name} must be a graph buffer (a BufferType input), because it"
                f" is updated in place; got {_describe(value)}"
            )
            return False
        if self._device is None:
            # The owner stays: the first buffer of an op is its ring.
            self._device = value.device
        return self._require_type(name, value, axes, self._dtypes)

    def _require_type(
        self,
        name: str,
        value: TensorValue | BufferValue,
        axes: Sequence[str],
        dtypes: Sequence[DType],
    ) -> bool:
        self.require_dtype(f"{name}.dtype", value.dtype, dtypes)
        if self._device is None:
            self._device, self._device_owner = value.device, name
        if value.device != self._device:
            self.add(
                f"{name}.device must be {self._device_owner}'s, {self._device}, got"
                f" {value.device}"
            )
        if value.rank != len(axes):
            self.add(_rank_message(name, axes, value.rank))
            return False
        for index, (axis, size) in enumerate(zip(axes, value.shape, strict=True)):
            known = self._sizes.setdefault(axis, size)
            if (
                isinstance(known, StaticDim)
                and isinstance(size, StaticDim)
                and known != size
            ):
                self.add(f"{name}.shape[{index}] must be {axis} ({known}), got {size}")
        return True

    def require_static(self, axis: str, least: int) -> int:
        """Notes a size that is too small, or not known yet.

        Args:
            axis: Name of the size.
            least: The smallest value allowed.

        Returns:
            The size; 0 where a problem was noted.
        """
        size = self._sizes.get(axis)
        if isinstance(size, StaticDim):
            self.require_at_least(axis, int(size), least)
            return int(size)
        if size is not None:
            self.add(f"{axis} {_WHEN}, got {size}")
        return 0


def _rank_message(name: str, axes: Sequence[str], rank: int) -> str:
    return f"{name}.rank must be {len(axes)} ([{', '.join(axes)}]), got {rank}"


def _describe(value: object) -> str:
    kind = type(value).__name__
    if isinstance(value, TensorValue | BufferValue):
        sizes = ", ".join(map(str, value.shape))
        return f"a {kind} of {value.dtype.name} [{sizes}]"
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
