"""The processes that accelerate, torchrun or Slurm started, and how they talk."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..errors import HiesError, RequestError, StepError, require_package

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# One process may export and measure for hours while the others wait. Once all have come, they only exchange.
LONGEST_WAIT = timedelta(days=7)
LONGEST_EXCHANGE = timedelta(minutes=30)
# Seconds that a process that stops waits for the others to notice why.
PATIENCE = 600.0
PATIENCE_AFTER_LOSS = 5.0
# Seconds in which the first process prints, before a launcher sees that another has ended and ends all of them.
TIME_TO_PRINT = 1.0
# What a process must find in its environment.
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Piece:
    """What a batch adds to one sum.

    Attributes:
        owner: The process that holds the sum.
        key: What the owner knows the sum by; it is pickled.
        tensors: Name -> tensor, of any shapes, dtypes and devices.
    """

    owner: int
    key: Any
    tensors: Mapping[str, Tensor]


def asked() -> int:
    """Return how many processes the environment says there are."""
    given = os.environ.get("WORLD_SIZE", "1")
    return int(given) if given.isdecimal() else 1


def own_devices() -> list[int] | None:
    """Return the GPUs of this machine that this process may spread a model over; None for all."""
    import torch

    local, here = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if asked() == 1 or here == 1 or not torch.cuda.is_available():
        return None
    each = torch.cuda.device_count() // here
    return list(range(local * each, (local + 1) * each))


class OtherFailedError(HiesError):
    """What another process said when it failed, or that it is gone.

    Args:
        failure: What `Group.tell` wrote.
        world: Number of processes.
        first_is_gone: Whether the process that prints is gone.
    """

    def __init__(self, failure: Mapping[str, Any], world: int, *, first_is_gone: bool = False):
        self.exit_code, self.lost, self.first_is_gone = failure["exit_code"], failure["lost"], first_is_gone
        process = f"process {failure['process']} of {world} (from 0)"
        super().__init__(failure["message"] if self.lost else f"{process} stopped: {failure['message']}")


class Group:
    """The processes, and how they talk: a store for failures, gloo to wait and for objects, the fastest for tensors.

    Attributes:
        rank, world: Number of this process, and of all.
        alone: Whether this process works while the others wait.
    """

    # How often this process has joined others, so that each time has its own part of the store.
    _joined = 0

    def __init__(self, rank: int, world: int, device: torch.device, *, close: bool):
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        self.rank, self.world, self.alone = rank, world, False
        self._device, self._close, self._patience, self._failed = device, close, PATIENCE, False
        # Waiting in the store or in gloo takes no GPU, unlike in NCCL, and gloo notices when a process is gone.
        self._control = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
        Group._joined += 1
        self._store = dist.PrefixStore(f"hies_export/{Group._joined}", _get_default_store())

    @classmethod
    def join(cls) -> Group:
        """Meet the other processes."""
        require_package("accelerate", who="several processes (WORLD_SIZE) need", package="accelerate", extra="big")
        missing = [name for name in VARIABLES if name not in os.environ]
        if missing:
            raise RequestError(
                f"one process of several needs {', '.join(VARIABLES)} in its environment, but it lacks "
                f"{', '.join(missing)}; start it by accelerate launch or torchrun, or set them"
            )
        import torch
        import torch.distributed as dist
        from accelerate import PartialState

        if torch.cuda.is_available() and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
            raise RequestError(
                f"every process must have a GPU of its own, but there are {os.environ['LOCAL_WORLD_SIZE']} processes "
                f"and {torch.cuda.device_count()} GPUs; start fewer processes"
            )
        # Who imports this package and met before, as with an Accelerator, also parts.
        close = not dist.is_initialized()
        state = PartialState(cpu=not torch.cuda.is_available(), timeout=LONGEST_EXCHANGE)
        if state.num_processes != asked():
            raise RequestError(
                f"the environment says {asked()} processes (WORLD_SIZE), but accelerate sees {state.num_processes}; "
                "start them by accelerate launch or torchrun"
            )
        # accelerate numbers the CPU, and to torch "cpu:0" is another device than "cpu".
        device = torch.device("cpu") if state.device.type == "cpu" else state.device
        devices = own_devices()
        if devices is not None:
            # Of several GPUs per process, the first.
            device = torch.device("cuda", devices[0])
            torch.cuda.set_device(device)
        return cls(state.process_index, state.num_processes, device, close=close)

    def meet(self) -> None:
        """Wait until every process is here.

        Raises:
            HiesError: One of them has failed or is gone.
        """
        import torch.distributed as dist

        try:
            work = dist.barrier(group=self._control, async_op=True)
            started = time.monotonic()
            while not work.is_completed():
                self._check()
                time.sleep(min(0.0002 + (time.monotonic() - started) / 8, 0.25))
            work.wait()
        except RuntimeError as error:
            self._lost(error)

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every process."""
        import torch
        import torch.distributed as dist

        def place(storage: Any, saved: str) -> Any:
            return storage if saved == "cpu" else storage.to(device=self._device)

        written = io.BytesIO()
        torch.save(value, written)
        found: list[Any] = [None] * self.world
        self.meet()
        try:
            dist.all_gather_object(found, written.getvalue(), group=self._control)
        except RuntimeError as error:
            self._lost(error)
        return [torch.load(io.BytesIO(part), map_location=place, weights_only=False) for part in found]

    def broadcast(self, tensor: Tensor, owner: int) -> None:
        """Overwrite a tensor, in every process, with the one that its owner has."""
        import torch
        import torch.distributed as dist

        self.meet()
        # As bytes, which every backend knows; `copy_` brings them back to where they were.
        moved = tensor.detach().to(self._device).contiguous()
        try:
            dist.broadcast(moved.reshape(-1).view(torch.uint8), src=owner)
        except RuntimeError as error:
            self._lost(error)
        if self.rank != owner:
            with torch.no_grad():
                tensor.copy_(moved)

    def exchange(self, pieces: Sequence[Piece] | None) -> list[Piece] | None:
        """Send pieces to their owners, and return those for this process, in the order of the processes.

        Args:
            pieces: None if there are no more.

        Returns:
            None if no process has any more.
        """
        described = None if pieces is None else [_described(piece) for piece in pieces]
        all_described = self.gather(described)
        if all(part is None for part in all_described):
            return None
        found: list[Piece] = []
        receive: list[tuple[int, Tensor]] = []
        for source, part in enumerate(all_described):
            if source == self.rank:
                found += [piece for piece in pieces or () if piece.owner == self.rank]
                continue
            for owner, key, shapes in part or ():
                if owner == self.rank:
                    tensors = {name: self._empty(*shape) for name, shape in shapes.items()}
                    receive += [(source, tensor) for tensor in tensors.values()]
                    found.append(Piece(owner, key, tensors))
        send = [(p.owner, t) for p in pieces or () if p.owner != self.rank for t in p.tensors.values()]
        self._transfer(send, receive)
        return found

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        import torch

        return torch.empty(shape, dtype=dtype, device=self._device)

    def _transfer(self, send: Sequence[tuple[int, Tensor]], receive: Sequence[tuple[int, Tensor]]) -> None:
        """Send tensors, and fill others with what is sent; between two processes they keep their order."""
        import torch
        import torch.distributed as dist

        def as_bytes(tensor: Tensor) -> Tensor:
            return tensor.view(-1).view(torch.uint8)

        operations = []
        for other, tensor in send:
            if tensor.numel():
                moved = tensor.detach().to(self._device).contiguous()
                operations.append(dist.P2POp(dist.isend, as_bytes(moved), other))
        for other, tensor in receive:
            if tensor.numel():
                operations.append(dist.P2POp(dist.irecv, as_bytes(tensor), other))
        try:
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
        except RuntimeError as error:
            self._lost(error)

    def tell(self, error: BaseException) -> None:
        """Let the others fail, unless one of them failed first."""
        self._failed = True
        if isinstance(error, OtherFailedError):
            return
        message = str(error) if isinstance(error, HiesError) else f"{type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt):
            message = "it was interrupted"
        self._write({"message": message, "exit_code": getattr(error, "exit_code", 1), "lost": False})

    def leave(self) -> None:
        """Wait until all know that this process goes, because the store may go with it; then close the connections."""
        import torch.distributed as dist
        from accelerate import PartialState

        with suppress(RuntimeError):
            self._store.add("left", 1)
            until = time.monotonic() + self._patience
            while self._store.add("left", 0) < self.world and time.monotonic() < until:
                time.sleep(0.02)
        if self._failed and self.rank > 0:
            time.sleep(TIME_TO_PRINT)
        if self._close:
            dist.destroy_process_group()
            PartialState._reset_state()

    def _write(self, failure: dict[str, Any]) -> None:
        with suppress(RuntimeError):
            self._store.compare_set("failure", "", json.dumps({"process": self.rank, **failure}))

    def _check(self) -> None:
        """Raise what another process said when it failed."""
        if self._store.check(["failure"]):
            failed = OtherFailedError(json.loads(self._store.get("failure")), self.world)
            if failed.lost:
                self._patience = PATIENCE_AFTER_LOSS
            raise failed

    def _lost(self, error: RuntimeError) -> None:
        """Raise why the processes cannot talk any more: one failed, or is gone."""
        self._patience, first_is_gone = PATIENCE_AFTER_LOSS, False
        try:
            self._check()
        except RuntimeError:
            first_is_gone = True  # and the store with it
        message = (
            "one of the processes is gone (killed, or out of memory); see what its machine says, and start all again"
        )
        failure = {"message": message, "exit_code": StepError.exit_code, "lost": True}
        self._write(failure)
        raise OtherFailedError({"process": self.rank, **failure}, self.world, first_is_gone=first_is_gone) from error


def _described(piece: Piece) -> tuple[int, Any, dict[str, Any]]:
    """Return what the owner must know before it receives a piece."""
    return piece.owner, piece.key, {name: (tuple(t.shape), t.dtype) for name, t in piece.tensors.items()}
