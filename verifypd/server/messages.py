"""What the processes of the server tell each other, and the sockets they do it over. Knows nothing of HTTP or tensors.

Three kinds of process: the supervisor, the engine, and API workers. Each has one inbox; messages are msgpack over
ZeroMQ, and an engine that was started again has an inbox of its own, so nothing meant for the old one reaches it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import zmq

FIELD = "response_format"  # what errors of a constraint name, until it is known which field it is from
CANNOT = "the output format cannot be used"  # what they begin with


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """A constraint on the output: `text` in the language of `kind`: json, regex, lark, choice or tool (our Lark)."""

    kind: str
    text: str


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """A choice that goes on where an engine left it: the output tokens it has. Everything else follows from them."""

    choice: int
    tokens: list[int]


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """API to engine: a call with its prompts, each to be continued `n` times. Choice i belongs to prompt i // n."""

    worker: int
    call: int  # unique within its worker
    name: str  # request id for the logs
    prompts: list[list[int]]
    n: int
    params: dict[str, Any]  # fields of SamplingParams
    seeds: list[int]  # one a prompt
    arrival: float  # s of the machine's monotonic clock
    key: int  # which API key
    bad_words: list[list[int]]
    grammar: GrammarSpec | None = None
    begun: list[Begun] | None = None  # of a call that was let in before: the choices that have not ended
    model: str = ""  # whose tokens these are, where there may be engines of another

    @property
    def open(self) -> list[Begun]:
        """The choices to be continued, and from where."""
        if self.begun is not None:
            return self.begun
        return [Begun(choice, []) for choice in range(len(self.prompts) * self.n)]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """API to engine: stop one choice of a call, or all of them (-1)."""

    worker: int
    call: int
    choice: int
    reason: str = "abort"


class Switch(msgspec.Struct, frozen=True, array_like=True, tag="switch"):
    """API to engine: run under another architecture."""

    worker: int
    call: int  # unique within its worker, as those of Submit
    architecture: str


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """Supervisor to engine: a worker died; nobody waits for its calls."""

    worker: int


class Quit(msgspec.Struct, frozen=True, array_like=True, tag="quit"):
    """Supervisor to anybody: end now."""


class Drain(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """Supervisor to API: take nothing new; report when nothing runs any more."""


class Up(msgspec.Struct, frozen=True, array_like=True, tag="up"):
    """Engine to supervisor, and on to the workers: ready for requests."""

    epoch: int
    address: str
    info: dict[str, Any]


class Down(msgspec.Struct, frozen=True, array_like=True, tag="down"):
    """Supervisor to workers: that engine is gone."""

    epoch: int
    reason: str
    final: bool = False  # it will not come back


Scores = list[tuple[int, float, int]]  # of one position: (token id, logprob, rank), that of its own token first


class Output(msgspec.Struct, frozen=True, array_like=True):
    """What one choice gained in a step."""

    call: int
    choice: int
    tokens: list[int]
    finish: str | None
    stop_reason: int | None
    spec: list[int]  # totals so far: spans, drafted, accepted, emitted by spans, cached tokens, accepted by position …
    logprobs: list[Scores] | None = None  # per token
    prompt_logprobs: list[Scores] | None = None  # from the second prompt token on
    error: str | None = None  # why its output format cannot be followed any further
    origins: list[tuple[str, tuple[int, ...]]] | None = None  # per token: who wrote it, and drafts that fell there
    start: int = 0  # output tokens of the choice before these


class Outputs(msgspec.Struct, frozen=True, array_like=True, tag="outputs"):
    """Engine to API: everything one step gave the calls of a worker."""

    epoch: int
    outputs: list[Output]


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """Engine to API: a call is admitted, a switch is made (status 0), or refused with an HTTP status and the reason."""

    epoch: int
    call: int
    status: int = 0
    message: str = ""
    code: str = ""
    param: str | None = None
    retry_after: int = 0  # s


class Stats(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """Engine to API: its figures, for /metrics."""

    epoch: int
    figures: dict[str, Any]


class Drained(msgspec.Struct, frozen=True, array_like=True, tag="drained"):
    """API to supervisor: nothing runs in this worker any more."""

    worker: int


class Serving(msgspec.Struct, frozen=True, array_like=True, tag="serving"):
    """API to supervisor: this worker accepts connections, and knows the engine of that epoch (0: none yet)."""

    worker: int
    epoch: int = 0


ToEngine = Submit | Abort | Switch | Gone | Quit
ToWorker = Up | Down | Drain | Quit | Outputs | Answer | Stats
ToSupervisor = Up | Drained | Serving

encode = msgspec.msgpack.Encoder().encode


class Addresses(msgspec.Struct, frozen=True):
    """Where everybody's inbox is: files in a folder that only this user can enter."""

    folder: str

    def supervisor(self) -> str:
        """The supervisor's inbox."""
        return f"ipc://{Path(self.folder) / 'supervisor'}"

    def engine(self, epoch: int) -> str:
        """The inbox of the engine's `epoch`-th start."""
        return f"ipc://{Path(self.folder) / f'engine-{epoch}'}"

    def worker(self, index: int) -> str:
        """The inbox of an API worker."""
        return f"ipc://{Path(self.folder) / f'api-{index}'}"


def inbox(context: zmq.Context, address: str) -> zmq.Socket:
    """A bound socket to receive on; never drops."""
    socket = context.socket(zmq.PULL)
    socket.set_hwm(0)
    socket.linger = 0
    socket.bind(address)
    return socket


def outbox(context: zmq.Context, address: str) -> zmq.Socket:
    """A socket to send on; sending never waits."""
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.linger = 200  # ms
    socket.connect(address)
    return socket
