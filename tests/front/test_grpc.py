"""Front workers serve gRPC at one port; the engine answers, and what they count is the instance's."""

from __future__ import annotations

import grpc

from npu_gr.core.kinds import KINDS
from npu_gr.front.sockets import hold
from npu_gr.server.config import ServerConfig
from npu_gr.server.rpc.inference import INFERENCE, message
from tests.front.rig import fronted
from tests.server.examples import EXAMPLES
from tests.server.fake import FakeService
from tests.server.oip.inputs import Input, infer_message
from tests.server.rpc.rig import call
from tests.serving import free_port, until


async def test_workers_share_the_port() -> None:
    service = FakeService({name: one.answer for name, one in EXAMPLES.items()})
    port = free_port()
    held = hold(ServerConfig(grpc_port=port, workers=2))
    async with fronted(service, num_workers=2, grpc_port=port) as rig:
        inputs = [Input("user_id", "BYTES", ["u"]), Input("candidates", "INT64", [1, 2, 3])]
        for _ in range(8):  # the kernel spreads connections
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
                infer = infer_message("rank", inputs)
                inferred = await call(channel, f"/{INFERENCE}/ModelInfer", infer, "inference.ModelInferResponse")
                assert inferred.model_version == "m"
                statistics = message("inference.ModelStatisticsRequest")(name="rank")
                answer = "inference.ModelStatisticsResponse"
                counted = await call(channel, f"/{INFERENCE}/ModelStatistics", statistics, answer)
                assert counted.model_stats[0].name == "rank"
        assert len(service.served) == 8

        def num(route: str) -> float:
            labels = {"route": route, "code": "200"}
            return rig.metrics.registry.get_sample_value("npu_gr_requests_total", labels) or 0.0

        await until(lambda: num(f"/{INFERENCE}/ModelInfer") == 8)
        rank = KINDS["rank"].name
        assert (
            rig.metrics.registry.get_sample_value("npu_gr_admissions_total", {"kind": rank, "verdict": "admitted"}) == 8
        )
    for one in held:
        one.close()
