"""The processes of one attempt of a run find each other, through a store that outlives attempts.

`torchrun` restarts all processes of a run when one of them ends, and keeps one store for all attempts. Keys of ended
processes, such as addresses of Gloo, would mislead later processes. So processes meet before they make a process group:

1. Each process adds a line to a list in the store: its rank, and a random number.
2. Rank 0 draws a token, and publishes it with the latest number of each rank. When the list grows, it draws a new
   token.
3. A process that finds its own number beside the token writes a confirmation under the token.
4. When all ranks have confirmed, rank 0 publishes that they met. The token is the prefix of all keys of the attempt.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from autoshard.errors import LostRankError, NotAvailableError
from autoshard.runtime.agreement.lost_ranks import naming_a_lost_store

_CAME, _SHOWN, _SAID, _VERDICT = "autoshard/came", "autoshard/shown", "said", "verdict"
_ALL_CAME = "all"
_GRACE_S = 5.0
"""Seconds that other ranks wait longer than rank 0, so that they read which ranks rank 0 misses."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1


def launcher_keeps_store() -> bool:
    """Whether `torchrun` started this process, and keeps one store for all attempts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def refuse_a_kept_store(store: dist.Store) -> None:
    """Raise `NotAvailableError` if a process group's `store` is torchrun's, and so has keys of earlier attempts."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restarts and launcher_keeps_store() and _is_of_launcher_alone(store):
        raise NotAvailableError(
            f"torch.distributed was initialized on the store that torchrun keeps over restarts, and this is restart "
            f"{restarts}. The store contains addresses of ended processes, so ranks may wait for them. Leave out "
            "init_process_group and init_device_mesh, and pass autoshard.Mesh({...}) to compile, which initializes "
            "torch.distributed itself. Or start torchrun with the environment variable "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which gives each attempt a store."
        )


def _is_of_launcher_alone(store: dist.Store) -> bool:
    """Whether `store` writes its keys into torchrun's store without any prefix but torch's own."""
    kept = store
    while isinstance(kept, dist.PrefixStore):
        kept = kept.underlying_store
    if not isinstance(kept, dist.TCPStore) or str(kept.port) != os.environ.get("MASTER_PORT"):
        return False
    key = f"autoshard/{secrets.token_hex(8)}"
    store.set(key, "")
    is_alone = any(kept.check([prefix + key]) for prefix in _PREFIXES_OF_TORCH)
    store.delete_key(key)
    return is_alone


_PREFIXES_OF_TORCH = ("default_pg/0//", "0//")
"""Torch's prefixes of keys: of its default store, and of a store that was passed to `init_process_group`.

Torch below 2.13 puts the number of the attempt in front.
"""


def meet(timeout_s: float) -> tuple[dist.Store, int, int]:
    """Wait for the other processes of this attempt, all of which must call this.

    Returns:
        A store for this attempt alone, the rank of this process, and the number of ranks.

    Raises:
        LostRankError: a rank did not come within `timeout_s` seconds.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with naming_a_lost_store(rank):
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        token = meet_in(store, rank, ranks, timeout_s)
    return dist.PrefixStore(f"autoshard/{token}", store), rank, ranks


def meet_in(store: dist.Store, rank: int, ranks: int, timeout_s: float) -> str:
    """Meet the other ranks by the steps in the module's docstring, and return the token of this attempt.

    `store` outlives attempts. This process has rank `rank` of `ranks`.
    """
    number = secrets.token_hex(8)
    store.append(_CAME, f"{rank} {number}\n")  # type: ignore[attr-defined]  (torch's stubs lack it)
    return _lead(store, number, ranks, timeout_s) if rank == 0 else _follow(store, rank, number, timeout_s)


def _lead(store: dist.Store, number: str, ranks: int, timeout_s: float) -> str:
    token, shown, said = "", dict[str, str](), set[str]()
    for _ in _until(timeout_s):
        came = dict(line.split() for line in _lines(store, _CAME))
        if came["0"] != number:
            raise LostRankError(
                "The launcher started this run again. This process, rank 0 of the previous attempt, ends."
            )
        if came != shown:
            token, shown = secrets.token_hex(8), came
            store.set(_SHOWN, f"{token}\n" + "\n".join(came.values()))
        said = set(_lines(store, f"autoshard/{token}/{_SAID}"))
        if len(said) == ranks - 1:
            store.set(f"autoshard/{token}/{_VERDICT}", _ALL_CAME)
            return token
    lost = [rank for rank in range(1, ranks) if str(rank) not in said]
    verdict = f"Ranks {lost} did not come within {timeout_s:.0f} s{_ADVICE}"
    store.set(f"autoshard/{token}/{_VERDICT}", verdict)
    raise LostRankError(verdict)


def _follow(store: dist.Store, rank: int, number: str, timeout_s: float) -> str:
    said = ""
    for _ in _until(timeout_s + _GRACE_S):
        token, *numbers = _lines(store, _SHOWN) or [""]
        if number in numbers and token != said:
            said = token
            store.append(f"autoshard/{token}/{_SAID}", f"{rank}\n")  # type: ignore[attr-defined]  (as above)
        verdict = _read(store, f"autoshard/{said}/{_VERDICT}")
        if verdict == _ALL_CAME:
            return said
        if verdict:
            raise LostRankError(verdict)
    raise LostRankError(f"Ranks [0] did not come within {timeout_s + _GRACE_S:.0f} s{_ADVICE}")


_ADVICE = (
    ", while the ranks of this run were to meet. A rank that ended has an error of its own, so look for it first. If a "
    "rank works alone for longer before it compiles, pass more seconds as Options(timeout_s=)."
)


def _lines(store: dist.Store, key: str) -> list[str]:
    return _read(store, key).splitlines()


def _read(store: dist.Store, key: str) -> str:
    """Return the text under a key of the store, or "" if the key is missing."""
    return store.get(key).decode() if store.check([key]) else ""


def _until(timeout_s: float) -> Iterator[None]:
    """Yield repeatedly, with growing pauses, until `timeout_s` seconds have passed."""
    end, pause_s = time.monotonic() + timeout_s, _SHORTEST_PAUSE_S
    while time.monotonic() < end:
        yield
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
