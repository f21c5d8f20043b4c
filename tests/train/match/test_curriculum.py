"""Negatives come from the easiest share, and the share grows to all."""

from __future__ import annotations

import pytest
import torch

from npu_gr.train.match.model import Negatives, inter_loss, intra_loss, share


def test_only_the_easiest_are_drawn_and_all_of_them() -> None:
    centrality = torch.rand(50) + 0.5
    anchors = centrality.log()[:20]
    drawn = Negatives(centrality).draw(anchors, 3000, 0.3, torch.Generator().manual_seed(0))
    for anchor, nodes in zip(anchors, drawn, strict=True):
        distance = (centrality.log() - anchor).abs()
        easiest = set(distance.argsort(descending=True)[:15].tolist())
        assert set(nodes.tolist()) == easiest


def test_without_a_curriculum_every_node_is_drawn() -> None:
    drawn = Negatives(torch.rand(20) + 0.5).draw(
        torch.zeros(1), 2000, 1.0, torch.Generator().manual_seed(0)
    )
    assert len(drawn.unique()) == 20


def test_the_share_rises_from_the_start_to_all() -> None:
    shares = [share(done / 10) for done in range(11)]
    assert shares[0] == pytest.approx(0.3)
    assert shares[-1] == 1
    assert shares == sorted(shares)


def test_losses_are_their_definitions() -> None:
    logits = torch.randn(5, 4)
    want = -(logits[:, 0].sigmoid().log() + (-logits[:, 1:]).sigmoid().log().sum(1)).mean()
    torch.testing.assert_close(intra_loss(logits, 5), want)
    hide = torch.zeros(5, 3, dtype=torch.bool)
    want = torch.nn.functional.cross_entropy(logits / 0.2, torch.zeros(5, dtype=torch.int64))
    torch.testing.assert_close(inter_loss(logits, hide, 0.2, 5), want)
    hide[:, 2] = True
    want = torch.nn.functional.cross_entropy(logits[:, :3] / 0.2, torch.zeros(5, dtype=torch.int64))
    torch.testing.assert_close(inter_loss(logits, hide, 0.2, 5), want)
