"""What the guardians of a job tell each other, in a key-value store at the master's address and port."""

import json
import os
import socket
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from recipes.config.errors import EXIT_FAULT, UserError

ENDED = "ended"
CONNECT_SECONDS = 10


@dataclass(frozen=True)
class Cause:
    """Why a job ends.

    Args:
        rank, host: where it began.
        text: one line.
        code: with which the ranks end.
        graceful: the ranks are whole and may save before they go.
        said: the rank has printed it, and a user would not need it twice.
    """

    rank: int
    host: str
    text: str
    code: int = EXIT_FAULT
    graceful: bool = False
    said: bool = False

    @property
    def line(self) -> str:
        """As it is printed."""
        return f"{'stopped' if self.graceful else 'fault'}: rank {self.rank} on {self.host}: {self.text}"


def has_agent_store() -> bool:
    """Whether torchrun already serves a store at the master's address."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def master_socket() -> socket.socket:
    """Listen at the master's port, for `serve`.

    Raises:
        UserError: the port is taken.
    """
    port = int(os.environ["MASTER_PORT"])
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=4096
        )
    except OSError as error:
        raise UserError(
            f"port {port} of the master {socket.gethostname()}: {error.strerror}; another job may run there: give "
            "another one (deepspeed --master_port N, torchrun --master_port N, or MASTER_PORT=N)"
        ) from None


def serve(listening: socket.socket) -> TCPStore:
    """Serve the store of the whole job, torch's rendezvous included, as long as the result lives."""
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


class JobBoard:
    """One guardian's connection. Every method raises RuntimeError once the store cannot be reached."""

    def __init__(self) -> None:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # TCPStore prints a warning at each attempt that fails, and a master that starts later is no news
        with socket.create_connection((address, port), timeout=CONNECT_SECONDS):
            pass
        store = TCPStore(
            address,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_SECONDS),
        )
        # after torchrun's restart the last attempt's entries no longer count
        self._store = PrefixStore(f"job_board/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def post(self, cause: Cause) -> Cause:
        """Enter a cause; returns the job's first one."""
        return _read_cause(self._store.compare_set("cause", "", json.dumps(asdict(cause))))

    def cause(self) -> Cause | None:
        """The job's first cause, if it ends."""
        return _read_cause(self._store.get("cause")) if self._store.check(["cause"]) else None

    def expect(self, world_size: int) -> None:
        """Make the entry of every rank; rank 0 does it once."""
        for rank in range(world_size):
            self._store.set(f"beat/{rank}", "")

    def beat(self, rank: int, sign: str) -> None:
        """Enter a new sign of life, or ENDED."""
        self._store.set(f"beat/{rank}", sign)

    def beats(self, world_size: int) -> list[str]:
        """The last sign of every rank; empty before its first."""
        return [value.decode() for value in self._store.multi_get([f"beat/{rank}" for rank in range(world_size)])]

    def close(self) -> None:
        """Say that the job is over and the store about to go."""
        self._store.set("over", "1")

    def is_over(self) -> bool:
        """Whether rank 0 has closed the board."""
        return self._store.check(["over"])


def _read_cause(value: bytes) -> Cause:
    return Cause(**json.loads(value))
