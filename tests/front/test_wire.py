"""What goes into a frame comes out of it, for the request and the answer of every kind, and every error."""

from __future__ import annotations

from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core import errors
from npu_gr.core.errors import NpuGrError, Overloaded, Refusal, StoreFailed, StoreFault, Unprocessable
from npu_gr.core.history import Events, HistoryRef, UserKey, Write
from npu_gr.core.kinds import KINDS, Kind
from npu_gr.core.request import IngestRequest, RankRequest
from npu_gr.front import frames
from npu_gr.front.frames import BY_KIND, decode, encode
from npu_gr.front.wire import CauseElsewhere, FailedElsewhere, decoder, encoder, pack_error, unpack_error, wire_of
from tests.server.examples import EXAMPLES

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)

PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    float: st.floats(allow_nan=False),
    int: st.integers(-(2**63), 2**63 - 1),
}


def arrays(dtype: np.dtype[Any], two: bool = False) -> st.SearchStrategy[Any]:
    def make(values: list[int]) -> Any:
        flat = np.array(values, np.int64).astype(dtype)
        return flat[: len(flat) // 2 * 2].reshape(-1, 2) if two else flat

    return st.lists(st.integers(-(2**15), 2**15 - 1), max_size=30).map(make)


def values(of: Any) -> st.SearchStrategy[Any]:
    """Values of a type, as annotations write it."""
    origin = get_origin(of)
    if origin is np.ndarray:
        dtype = np.dtype(get_args(get_args(of)[1])[0])
        return arrays(dtype, two=dtype == np.int32)
    if isinstance(of, type) and issubclass(of, Events):
        return st.integers(0, 9).map(lambda n: Events.make(range(n), [1] * n, range(n)))
    if isinstance(of, type) and issubclass(of, NpuGrError):
        return TEXT.map(Unprocessable)
    if of in PLAIN:
        return PLAIN[of]
    if isinstance(of, type) and issubclass(of, msgspec.Struct):
        hints = get_type_hints(of)
        return st.builds(of, **{name: values(hints[name]) for name in of.__struct_fields__})
    if isinstance(of, type) and issubclass(of, tuple) and hasattr(of, "_fields"):
        return st.builds(of, **{name: values(hint) for name, hint in get_type_hints(of).items()})
    if origin is tuple:
        return st.lists(values(get_args(of)[0]), max_size=4).map(tuple)
    if origin is not None and isinstance(origin, type) and hasattr(origin, "keys"):
        return st.dictionaries(TEXT, values(get_args(of)[1]), max_size=4)
    if get_args(of) and origin.__name__ in ("Union", "UnionType"):
        return st.one_of(*(values(one) for one in get_args(of)))
    return st.from_type(of)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    if isinstance(a, NpuGrError):
        return type(a) is type(b) and str(a) == str(b)
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(same(getattr(a, name), getattr(b, name)) for name in a.__struct_fields__)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(type(a) is type(b) and a == b)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_requests_and_answers_come_out_as_they_went_in(kind: Kind[Any, Any], data: st.DataObject) -> None:
    form = BY_KIND[kind.name]
    request = data.draw(values(kind.request))
    trace = ("a" * 32, "b" * 16, None, True)
    call = decode(encode(form.call(7, 1.5, 1.25, trace, True, frames.pack(form.request, request))))
    assert type(call) is form.call
    assert (call.id, call.due_at, call.came_at, call.trace, call.wants_titles) == (7, 1.5, 1.25, trace, True)
    assert same(frames.unpack(form.request, call.request), request)
    answer = data.draw(values(kind.answer))
    out = decode(encode(form.answer(7, frames.pack(form.answered, answer), ("a", 1), (None, "b"))))
    assert (type(out), out.id, out.names, out.titles) == (form.answer, 7, ("a", 1), (None, "b"))
    assert same(frames.unpack(form.answered, out.answer), answer)


def test_the_comparison_sees_differences() -> None:
    one = EXAMPLES["rank"].answer
    assert not same(one, msgspec.structs.replace(one, prefix_tokens=9))
    assert not same(one, msgspec.structs.replace(one, scores={"click": np.zeros(3, np.float32)}))


def test_an_array_is_not_of_the_frame_that_it_came_in() -> None:
    form = BY_KIND["rank"]
    request = RankRequest(user=UserKey("", "u"), candidates=np.arange(1000), history=HistoryRef())
    data = bytearray(encode(form.call(1, 0.0, 0.0, None, False, frames.pack(form.request, request))))
    read = frames.unpack(form.request, decode(data).request).candidates
    data[:] = bytes(len(data))  # the buffer is filled again
    assert np.array_equal(read, np.arange(1000))
    assert not read.flags.writeable


@pytest.mark.parametrize("wrong", [b"1234567", [3, b"12345678"], [0, b""], [-1, b"12345678"], [1], 7, "12345678"])
def test_bytes_that_are_no_array_are_no_frame(wrong: Any) -> None:
    read = decoder(wire_of(np.ndarray[Any, np.dtype[np.int64]]).type)
    assert read.decode(msgspec.msgpack.encode(b"12345678")).tolist() == [int.from_bytes(b"12345678", "little")]
    with pytest.raises(msgspec.ValidationError, match=r"bytes are no array of int64|nor rows of int64"):
        read.decode(msgspec.msgpack.encode(wrong))


def test_an_ingest_keeps_what_could_not_be_read_of_a_user() -> None:
    wire = wire_of(IngestRequest)
    bad = Unprocessable("events: 3 actions")
    request = IngestRequest(tenant="t", writes=(bad, Write(UserKey("t", "u"), Events.make([1], [1], [1]))))
    data = encoder().encode(frames.pack(wire, request))
    read = frames.unpack(wire, decoder(wire.type).decode(data))
    assert same(read, request)


LEAVES = [
    one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, NpuGrError) and one.__module__
]


@pytest.mark.parametrize("cls", LEAVES, ids=lambda one: one.__name__)
def test_every_error_is_the_same_on_the_other_side(cls: type[NpuGrError]) -> None:
    error = cls("what is wrong")
    error.__cause__ = TimeoutError("why")
    read = unpack_error(decode(encode(frames.FailureFrame(3, pack_error(error)))).error)
    assert type(read) is cls
    assert str(read) == "what is wrong"
    assert isinstance(read.__cause__, CauseElsewhere)
    assert str(read.__cause__) == "TimeoutError: why"


def test_errors_keep_what_else_they_say() -> None:
    refused = unpack_error(pack_error(Overloaded("no", 2.5, Refusal.SHED)))
    assert isinstance(refused, Overloaded)
    assert (refused.retry_after_s, refused.reason) == (2.5, Refusal.SHED)
    failed = unpack_error(pack_error(StoreFailed("no", StoreFault.DISK_FULL)))
    assert isinstance(failed, StoreFailed)
    assert failed.fault is StoreFault.DISK_FULL

    class Private(Unprocessable):
        """Of one module: its callers know the class above it."""

    assert type(unpack_error(pack_error(Private("x")))) is Unprocessable
    unknown = unpack_error(pack_error(KeyError("secret")))
    assert isinstance(unknown, FailedElsewhere)
    assert "secret" not in str(unknown)


def test_what_has_no_form_is_found_when_the_forms_are_derived() -> None:
    with pytest.raises(TypeError, match="has no form on the wire"):
        wire_of(type("Odd", (), {}))
