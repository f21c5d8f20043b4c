"""Every error the package raises on purpose, and the HTTP status of each leaf.

NpuGrError
├── ConfigError            bad YAML, checkpoint or path; the process must not start   (exit 2)
├── CheckpointError        a ConfigError about the model's files
├── StoreInUse             a ConfigError: another process has the embedded history store
├── DataError              a file of interactions or a query log cannot be read       (exit 2)
│   └── CatalogueError       a DataError: the records do not make a catalogue of semantic IDs
├── RequestError           the caller's fault
│   ├── BadRequest         broken body                                                (400)
│   ├── Unauthorized       no key, or a wrong one                                     (401)
│   ├── Forbidden          the key does not allow it, or the page that sent it            (403)
│   ├── NotFound           no such model or version                                   (404)
│   ├── UnknownPrefix      a delta on a prefix that is not known here: send it whole  (409)
│   ├── TooLarge           the body or a list is over its limit                       (413)
│   ├── BodyTooSlow        the body did not arrive in its time                        (408)
│   ├── UnsupportedMedia   a content type we do not read                              (415)
│   └── Unprocessable      well-formed, but a value is out of range                   (422)
│       └── ColdUser       nothing of the history is known: nothing to retrieve from  (422)
├── Overloaded             admission said no; retry elsewhere or later                (429)
├── Unavailable            starting, draining, or the history store is down           (503)
│   ├── NotTaken           an Unavailable: nothing was begun, another instance may    (503)
│   ├── StoreFailed        an Unavailable: the history store did not do its part      (503)
│   └── Unreachable        an Unavailable, at a caller: nobody answered, or half an answer came
├── DeadlineExceeded       the budget ran out before the work did                     (504)
├── BadAnswer              at a caller: what answered is no service of ours
└── ResourceError
    ├── PoolExhausted      no pages: rank without prefix KV       (never leaves the process)
    ├── StaleEntry         a DRAM copy was overwritten: recompute (never leaves the process)
    └── DeviceError        the accelerator failed; this instance drains               (503)
"""

from __future__ import annotations

from enum import StrEnum


class NpuGrError(Exception):
    """The root of the tree.

    `status` is the HTTP status; `title` names the class of error, and does not change.
    """

    status = 500
    title = "internal error"
    # of an error that a service answered, at its caller; None where it was raised in this process
    field: str | None = None  # of the request, that the message begins with
    request_id: str | None = None  # under which the service's log has it
    retry_after_s: float | None = None  # that the service asks to wait


class ConfigError(NpuGrError):
    """The configuration cannot be used; the message names the field and the limit."""

    title = "bad configuration"


class CheckpointError(ConfigError):
    """The model's files are missing, corrupt, or do not fit their own configuration."""

    title = "bad checkpoint"


class StoreInUse(ConfigError):
    """Another process has the embedded history store, and a file has one owner."""


class DataError(NpuGrError):
    """A data file cannot be read; the message names the file, the record and the reason."""

    title = "bad data file"


class CatalogueError(DataError):
    """Records do not make a catalogue of semantic IDs.

    The message names the record, counted from 1, and the reason.
    """

    title = "bad catalogue"


class RequestError(NpuGrError):
    """The caller's fault: the message names the field and the limit."""

    status = 400
    title = "bad request"


class BadRequest(RequestError):
    """The body cannot be parsed."""


class Unauthorized(RequestError):
    """No API key, or one that is not in the key file."""

    status = 401
    title = "unauthorized"


class Forbidden(RequestError):
    """The key is valid, and does not allow this request; or a page of another site sent it."""

    status = 403
    title = "forbidden"


class NotFound(RequestError):
    """No such route, model or model version."""

    status = 404
    title = "not found"


class UnknownPrefix(RequestError):
    """A delta names a prefix that this instance does not know: send the whole history."""

    status = 409
    title = "unknown prefix"


class TooLarge(RequestError):
    """The body or one of its lists is over its limit."""

    status = 413
    title = "too large"


class BodyTooSlow(RequestError):
    """The body of a request did not arrive in its time."""

    status = 408
    title = "request timeout"


class UnsupportedMedia(RequestError):
    """Neither JSON nor msgpack."""

    status = 415
    title = "unsupported media type"


class Unprocessable(RequestError):
    """Well-formed, but a value is out of range."""

    status = 422
    title = "unprocessable request"


class ColdUser(Unprocessable):
    """The catalogue knows no item of the user's history, so there is nothing to retrieve from."""


class Rejection(StrEnum):
    """Why a request was rejected for load; the value of the metric label `reason`."""

    LATE = "late"  # it could not be answered within its objective or its budget
    QUEUE = "queue"  # the device's queue is full
    RATE = "rate"  # its API key has a rate, and was over it
    SHARE = "share"  # its tenant signals far more than it ranks, and others share the instance
    SHED = "shed"  # it left the device's queue to make room for a more important job


class Overloaded(NpuGrError):
    """Admission said no. `retry_after_s` goes into the Retry-After header; `reason` is counted."""

    status = 429
    title = "overloaded"
    retry_after_s: float

    def __init__(
        self, message: str, retry_after_s: float = 1.0, reason: Rejection = Rejection.LATE
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class Unavailable(NpuGrError):
    """Starting, draining, or a store that the request needs is down."""

    status = 503
    title = "unavailable"


class NotTaken(Unavailable):
    """This instance starts, drains or has failed.

    It has not begun the request, so another one may take it.
    """


class Unreachable(Unavailable):
    """Nobody answered at the address, or the answer broke off: the caller cannot know whether the work was done."""


class StoreFault(StrEnum):
    """The fault of the history store; in answers, and a metric label."""

    UNAVAILABLE = "store_unavailable"  # it does not answer, or fails
    SLOW = "store_slow"  # it did not answer within its time limit
    BUSY = "store_busy"  # too many calls of this instance wait for it
    DISK_FULL = "disk_full"
    CORRUPT = "entry_corrupt"  # what it has of the user is damaged


class StoreFailed(Unavailable):
    """The history store did not do its part. `fault` says how."""

    def __init__(self, message: str, fault: StoreFault = StoreFault.UNAVAILABLE) -> None:
        super().__init__(message)
        self.fault = fault


class DeadlineExceeded(NpuGrError):
    """The caller's budget ran out; every lease and slot is already released."""

    status = 504
    title = "deadline exceeded"


class BadAnswer(NpuGrError):
    """An answer that no service of ours gives, as that of a proxy or of another version."""

    title = "bad answer"


class ResourceError(NpuGrError):
    """A device or memory tier could not do its part."""

    status = 503
    title = "resource error"


class PoolExhausted(ResourceError):
    """The pool has too few free or expired pages; nothing was evicted.

    The rank goes on without prefix KV.
    """


class StaleEntry(ResourceError):
    """A DRAM copy was overwritten while it was read. The rank goes on without it."""


class DeviceError(ResourceError):
    """The accelerator failed; this instance becomes unready."""

    title = "device error"
