"""HTTP/2 by hand: what no client library sends, for the listeners that grpcio serves."""

from __future__ import annotations

import random

from npu_gr.route import external_processor_pb2 as pb
from npu_gr.server.grpc.inference import message
from tests.server.oip.inputs import infer_message, inputs_of

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 0x1, 0x4
MOST_DATA = 16_384  # largest frame that every HTTP/2 server takes
STREAMS = 900  # open calls while a flood comes
RESETS = 2000  # calls that are opened and reset


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


def _text(data: bytes) -> bytes:
    """A literal of HPACK, not compressed: its length in 7 bits, then in groups of 7 bits."""
    if len(data) < 127:
        return bytes([len(data)]) + data
    left, size = len(data) - 127, b"\x7f"
    while left >= 128:
        size += bytes([left % 128 + 128])
        left //= 128
    return size + bytes([left]) + data


def block(headers: dict[bytes, bytes]) -> bytes:
    """A block of headers without an index."""
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())


def opened(stream: int, path: bytes, flags: int = END_HEADERS, **more: bytes) -> bytes:
    """The head of a call."""
    head = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"localhost",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    changed = {name.replace("_", "-").encode(): value for name, value in more.items()}
    return frame(HEADERS, flags, stream, block(head | changed))


def sent(stream: int, body: bytes) -> bytes:
    """A message of a call, and its end."""
    data = b"\0" + len(body).to_bytes(4, "big") + body
    pieces = [data[at : at + MOST_DATA] for at in range(0, len(data), MOST_DATA)]
    frames = [frame(DATA, 0, stream, piece) for piece in pieces[:-1]]
    return b"".join(frames) + frame(DATA, END_STREAM, stream, pieces[-1])


def begun(path: bytes = b"", num: int = 0) -> bytes:
    """The begin of a connection, with so many open calls."""
    calls = b"".join(opened(1 + 2 * n, path) for n in range(num))
    return PREFACE + frame(SETTINGS, 0, 0) + calls


def floods(path: bytes) -> dict[str, bytes]:
    """What ought to be cheap to serve or to close, behind `begun(path, STREAMS)`.

    Most are as in CVE-2019-9512 to 9518 and CVE-2023-44487.
    """
    most = 1 + 2 * STREAMS
    ids = range(1, most, 2)
    setting = b"\0\4" + (65_535).to_bytes(4, "big")  # SETTINGS_INITIAL_WINDOW_SIZE
    other = b"\0\4" + (65_536).to_bytes(4, "big")
    grows = (1).to_bytes(4, "big")
    return {
        "settings": (frame(SETTINGS, 0, 0, setting) + frame(SETTINGS, 0, 0, other)) * 5000,
        "empty settings": frame(SETTINGS, 0, 0) * 10_000,
        "pings": frame(PING, 0, 0, b"8 bytes.") * 10_000,
        "windows of the connection": frame(WINDOW, 0, 0, grows) * 10_000,
        "windows of the calls": b"".join(frame(WINDOW, 0, n, grows) for n in ids) * 20,
        "priorities": b"".join(frame(PRIORITY, 0, n, b"\0\0\0\0\7") for n in ids) * 20,
        "empty data": frame(DATA, 0, 1) * 10_000,
        "resets": b"".join(
            opened(n, path) + frame(RESET, 0, n, b"\0\0\0\x08")
            for n in range(most, most + 2 * RESETS, 2)
        ),
        "continuations": opened(most, path, 0) + frame(CONTINUATION, 0, most) * 10_000,
        "a head of many fields": frame(
            HEADERS, END_HEADERS, most, block({b":path": path}) + b"\0\1a\1b" * 3000
        ),
        "a head of one field": (
            frame(HEADERS, 0, most, block({b":path": path}) + b"\0" + _text(b"a" * 9000))
            + frame(CONTINUATION, END_HEADERS, most, b"a" * 9000) * 100
        ),
        "unknown frames": frame(99, 0, 0, b"?" * 100) * 10_000,
        "goodbyes": frame(GOAWAY, 0, 0, b"\0" * 8) * 10_000,
        "noise": random.Random(1).randbytes(1_000_000),
    }


def inference_bodies(size: int) -> dict[str, bytes]:
    """Messages of a ModelInfer: one that is valid, and some of about this size."""
    valid = infer_message("rank", inputs_of({"user_id": "u", "candidates": [1, 2]}))
    made = message("inference.ModelInferRequest")
    tensors = made(model_name="rank", inputs=[{"name": "a"}] * (size // 5))
    deep = b"\x0a\0" * (size // 2)  # model_name, again and again
    return {
        "valid": valid.SerializeToString(),
        "tensors": tensors.SerializeToString(),
        "empty fields": deep,
        "empty parameters": b"\x22\0" * (size // 2),
        "raw contents": b"\x3a\0" * (size // 2),
    }


def picker_bodies(size: int) -> dict[str, bytes]:
    """Messages of a gateway: one that is valid, and some of about this size."""
    pairs = ((b":method", b"POST"), (b":path", b"/v1/rank"), (b"x-user-id", b"u"))
    values = [pb.HeaderValue(key=key.decode(), raw_value=value) for key, value in pairs]
    head = pb.HeaderMap(headers=[one.SerializeToString() for one in values])
    valid = pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=head))
    many = pb.HeaderMap(headers=[values[0].SerializeToString()] * (size // 20))
    wide = pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=many))
    valid_bytes: bytes = valid.SerializeToString()
    return {
        "valid": valid_bytes,
        "headers": wide.SerializeToString(),
        "empty headers": b"\x12\0" * (size // 2),
        "metadata": valid_bytes + b"\x42" + b"\xfe\xff\x03" + b"\x0a\0" * 32_767,
        "a body first": pb.ProcessingRequest(
            request_body=pb.HttpBody(body=b"x" * (size - 100))
        ).SerializeToString(),
    }


def broken(seed: int, valid: bytes, path: bytes, num: int) -> list[bytes]:
    """Connections with valid calls of which some bytes are changed."""
    draw = random.Random(seed)
    found = []
    for _ in range(num):
        calls = b"".join(opened(n, path) + sent(n, valid) for n in (1, 3, 5))
        data = bytearray(begun() + calls)
        for _ in range(draw.choice((1, 1, 3, 20))):
            data[draw.randrange(len(PREFACE), len(data))] = draw.randrange(256)
        found.append(bytes(data[: draw.choice((len(data), draw.randrange(30, len(data))))]))
    return found
