"""The exceptions of the package, and the HTTP status of each leaf.

NpuGrError
├── ConfigError            bad YAML, checkpoint or path; the process must not start   (exit 2)
├── CheckpointError        a ConfigError about the model's files
├── StoreInUse             a ConfigError: another process has the store or log of one owner
├── DataError              a file of interactions or a query log cannot be read       (exit 2)
│   ├── CatalogueError       a DataError: the records do not make a catalogue of semantic IDs
│   └── DeltaError           a DataError: a delta of weights is damaged, or not the next one
├── RequestError           the client's fault
│   ├── BadRequest         broken body                                                (400)
│   ├── Unauthorized       no key, or a wrong one                                     (401)
│   ├── Forbidden          the key, or the page of origin, does not allow it          (403)
│   ├── NotFound           no such model or version                                   (404)
│   ├── UnknownPrefix      a delta on a prefix that is not cached: send the history   (409)
│   ├── TooLarge           the body or a list is over its limit                       (413)
│   ├── BodyTooSlow        the body did not arrive within its time limit              (408)
│   ├── UnsupportedMedia   a content type we do not read                              (415)
│   └── Unprocessable      well-formed, but a value is out of range                   (422)
│       └── ColdUser       no item of the history is known: nothing to retrieve from  (422)
├── Overloaded             rejected by admission; retry later or elsewhere            (429)
├── Unavailable            starting, draining, or the history store is down           (503)
│   ├── NotTaken           an Unavailable: not begun, another instance may take it    (503)
│   ├── StoreFailed        an Unavailable: the history store failed                   (503)
│   └── Unreachable        an Unavailable, in a client: no answer, or an incomplete one
├── DeadlineExceeded       the budget ran out before the work did                     (504)
├── BadAnswer              in a client: the answer is not of this service
└── ResourceError
    ├── PoolExhausted      no pages: rank without prefix KV       (never leaves the process)
    ├── StaleEntry         a DRAM copy was overwritten: recompute (never leaves the process)
    └── DeviceError        the accelerator failed; this instance drains               (503)
"""

from __future__ import annotations

from enum import StrEnum


class NpuGrError(Exception):
    """The root of the tree.

    `status` is the HTTP status; `title` names the class of error, and is stable.
    """

    status = 500
    title = "internal error"
    # in a client, from the answer of a service; None if raised in this process
    field: str | None = None  # field of the request, with which the message begins
    request_id: str | None = None  # as in the log of the service
    retry_after_s: float | None = None  # requested by the service


class ConfigError(NpuGrError):
    """The configuration cannot be used; the message names the field and the limit."""

    title = "bad configuration"


class CheckpointError(ConfigError):
    """The model's files are missing, corrupt, or do not fit their own configuration."""

    title = "bad checkpoint"


class StoreInUse(ConfigError):
    """Another process has opened a file that allows one owner: a history store, a change log."""


class DataError(NpuGrError):
    """A data file cannot be read; the message names the file, the record and the reason."""

    title = "bad data file"


class CatalogueError(DataError):
    """Records do not make a catalogue of semantic IDs.

    The message names the record, from 1, and the reason.
    """

    title = "bad catalogue"


class DeltaError(DataError):
    """A delta of a model's weights cannot be applied; the message has its number and the reason."""

    title = "bad delta"


class AppliedAlready(DeltaError):
    """The very same delta was added before."""

    def __init__(self, message: str, sequence: int = 0) -> None:
        super().__init__(message)
        self.sequence = sequence


class RequestError(NpuGrError):
    """The client's fault; the message names the field and the limit."""

    status = 400
    title = "bad request"


class BadRequest(RequestError):
    """The body cannot be parsed."""


class Unauthorized(RequestError):
    """No API key, or one that is not in the key file."""

    status = 401
    title = "unauthorized"


class Forbidden(RequestError):
    """The key does not allow this request, or a page of another site sent it."""

    status = 403
    title = "forbidden"


class NotFound(RequestError):
    """No such route, model or model version."""

    status = 404
    title = "not found"


class UnknownPrefix(RequestError):
    """A delta names a prefix that is not cached here; send the complete history."""

    status = 409
    title = "unknown prefix"


class TooLarge(RequestError):
    """The body or one of its lists is over its limit."""

    status = 413
    title = "too large"


class BodyTooSlow(RequestError):
    """The body of a request did not arrive within its time limit."""

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
    """No item of the user's history is in the catalogue, so retrieval has no input."""


class Rejection(StrEnum):
    """Why admission rejected a request; the value of the metric label `reason`."""

    LATE = "late"  # it would miss its objective or its budget
    QUEUE = "queue"  # the device's queue is full
    RATE = "rate"  # its API key exceeded its rate
    SHARE = "share"  # its tenant exceeded its share, and other tenants need the instance
    SHED = "shed"  # removed from the device's queue for a more important job


class Overloaded(NpuGrError):
    """Rejected by admission. `retry_after_s` is sent as Retry-After; `reason` is counted."""

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
    """The instance starts or drains, or a store that the request needs is down."""

    status = 503
    title = "unavailable"


class NotTaken(Unavailable):
    """This instance starts, drains or has failed.

    It has not begun the request, so another instance may take it.
    """


class Unreachable(Unavailable):
    """No answer, or an incomplete one: the client cannot know whether the request took effect."""


class StoreFault(StrEnum):
    """The fault of the history store; in answers, and a metric label."""

    UNAVAILABLE = "store_unavailable"  # it does not answer, or fails
    SLOW = "store_slow"  # it did not answer within its time limit
    BUSY = "store_busy"  # too many calls of this instance are waiting
    DISK_FULL = "disk_full"
    CORRUPT = "entry_corrupt"  # the user's entry is damaged


class StoreFailed(Unavailable):
    """The history store failed, as `fault` describes."""

    def __init__(self, message: str, fault: StoreFault = StoreFault.UNAVAILABLE) -> None:
        super().__init__(message)
        self.fault = fault


class DeadlineExceeded(NpuGrError):
    """The budget of the request ran out; all leases and permits are released."""

    status = 504
    title = "deadline exceeded"


class BadAnswer(NpuGrError):
    """An answer that is not of this service, as that of a proxy or of another version."""

    title = "bad answer"


class ResourceError(NpuGrError):
    """A device or memory tier failed."""

    status = 503
    title = "resource error"


class PoolExhausted(ResourceError):
    """The pool has too few free or expired pages; nothing was evicted.

    The rank continues without prefix KV.
    """


class StaleEntry(ResourceError):
    """A DRAM copy was overwritten while it was read. The rank continues without it."""


class DeviceError(ResourceError):
    """The accelerator failed; this instance becomes unready."""

    title = "device error"
