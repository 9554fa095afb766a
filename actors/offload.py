"""Tensors that lie on the device for a while and in host memory otherwise, for a trainer that shares its GPU.

    away()  ──►  bytes to pinned host memory, device memory freed       every tensor object stays what it is:
    bring() ──►  device memory again, bytes back                        only the storage behind it is emptied and filled

Emptying storages is what FSDP2 does to its gathered parameters. Nothing that holds on to a tensor notices: views, tied
weights, the optimizer, DTensors and FSDP2's own flat buffers find their bytes where they were once they are back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor


class Offload:
    """Moves the storages behind the tensors of `tensors()` (asked anew each time) between `device` and the host.

    The host memory is kept for good: pinning it anew each time would cost more than the copies.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]], device: str) -> None:
        self._tensors, self._device = tensors, torch.device(device)
        # By the address of the storage object, which emptying it does not change; the object is kept with it.
        self._homes: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        self.is_away = False

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Inside, the tensors are on the device; away afterwards, whatever happens."""
        self.bring()
        try:
            yield
        finally:
            self.away()

    @torch.no_grad()
    def away(self) -> None:
        """Empties the device; the bytes lie in host memory then."""
        homes = {}
        for storage in self._storages():
            _, home = self._homes.get(storage._cdata, (storage, None))
            if storage.nbytes():
                if home is None or home.numel() != storage.nbytes():
                    home = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
                home.copy_(_bytes(storage), non_blocking=True)
            if home is not None:
                homes[storage._cdata] = storage, home
        self._synchronize()
        self._homes = homes
        self._empty()
        self.is_away = True

    @torch.no_grad()
    def bring(self) -> None:
        """Fills the device again; where there is no room, all stays away and torch's OutOfMemoryError is raised."""
        if not self.is_away:
            return
        try:
            for storage, home in self._homes.values():
                storage.resize_(home.numel())
                _bytes(storage).copy_(home, non_blocking=True)
            self._synchronize()
        except BaseException:
            self._empty()  # the bytes at home are the whole truth still
            raise
        self.is_away = False

    def at_home(self, tensor: torch.Tensor) -> torch.Tensor:
        """What `tensor` says while it is away: the same view, of host memory. One that never leaves is itself."""
        if not self.is_away:
            return tensor
        _, home = self._homes.get(tensor.untyped_storage()._cdata, (None, None))
        if home is None:
            return tensor
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(home.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def _storages(self) -> list[torch.UntypedStorage]:
        """What lies behind the tensors of the device, each once."""
        found: dict[int, torch.UntypedStorage] = {}
        copies: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.device.type != self._device.type:
                continue
            storage = local.untyped_storage()
            if not storage.resizable():  # such as a file that is mapped: it gets memory of its own, once
                if storage._cdata not in copies:
                    copies[storage._cdata] = storage.clone()
                storage = copies[storage._cdata]
                local.set_(storage, local.storage_offset(), local.shape, local.stride())
            found[storage._cdata] = storage
        return list(found.values())

    def _empty(self) -> None:
        for storage, _ in self._homes.values():
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of a storage, uint8 `[nbytes]`."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
