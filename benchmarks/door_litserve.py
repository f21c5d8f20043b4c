"""LitServe with the same ranker, in its usual form: one worker, one request at a time.

python -m benchmarks.door_litserve CHECKPOINT PORT
"""

import sys
from pathlib import Path
from typing import Any

import litserve

from benchmarks.door_cold import ColdRanker
from npu_gr.core.process import set_up_process


class LitRanker(litserve.LitAPI):  # type: ignore[misc,unused-ignore]
    """The four steps that LitServe asks for."""

    def setup(self, device: str) -> None:
        """Load the model, in the worker."""
        self.ranker = ColdRanker(Path(sys.argv[1]))

    def decode_request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take the body as JSON gave it."""
        return request

    def predict(self, x: dict[str, Any]) -> dict[str, list[float]]:
        """Run the model."""
        return self.ranker.scores(x)

    def encode_response(self, output: dict[str, list[float]]) -> dict[str, dict[str, list[float]]]:
        """Name the scores as our own answer does."""
        return {"scores": output}


def main(port: int) -> None:
    """Serve until the process is ended."""
    set_up_process()
    server = litserve.LitServer(LitRanker(api_path="/v1/rank"), accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=port, num_api_servers=1, generate_client_file=False, log_level="warning")


if __name__ == "__main__":
    main(int(sys.argv[2]))
