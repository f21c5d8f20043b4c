"""What a person should know of a file of items or of users beside a log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from npu_gr.core.words import counted, quoted

FEW = 0.1  # share of the log's items or users in the file, below which the names are probably others


def notes_of(what: str, logged: Sequence[str], listed: Mapping[str, int], num_again: int) -> Iterator[str]:
    """Warn where the log and the file hardly share a name, and say how many rows come again.

    Args:
        what: "item" or "user".
        logged: names in the log.
        listed: names in the file.
        num_again: rows of the file whose name an earlier one has.
    """
    if num_again:
        yield f"{counted(num_again, 'row')} of the {what}s' file name one again: of each {what} the last row counts"
    num_shared = sum(name in listed for name in logged)
    if not logged or num_shared >= FEW * len(logged):
        return
    of_log = next((name for name in logged if name not in listed), logged[0])
    shared = set(logged)
    of_file = next((name for name in listed if name not in shared), None)
    beside = f"; the log has {quoted(of_log)}, the file {quoted(of_file)}" if of_file is not None else ""
    yield f"WARNING: the {what}s' file has {num_shared:,} of the log's {counted(len(logged), what)}{beside}"
