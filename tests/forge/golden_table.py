"""Prints what the losses and advantages give beside the golden numbers: `python tests/forge/golden_table.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from loss_cases import (
    ALGORITHMS,
    GRADIENTS,
    WITH_GRADIENT,
    WITH_VALUE,
    forward_input,
    gradient_input,
    kl_input,
    make_config,
    run,
    value_and_grad,
)

from forge.advantages import advantages
from forge.kl import kl_divergence

Row = tuple[str, float, float, float | None]
"""What, the golden number, ours, and the largest difference of a gradient."""


def rows() -> Iterator[Row]:
    for key, aggregation, changes, three in WITH_VALUE:
        loss = run(forward_input(three_policies=three), make_config(aggregation, **changes)).loss
        yield key, ALGORITHMS["outputs"][key], float(loss), None
    for key, aggregation, changes, three in WITH_GRADIENT:
        expected = GRADIENTS["expected"][key]
        value, grad = value_and_grad(gradient_input(three_policies=three), make_config(aggregation, **changes))
        yield _named(key, changes), expected["value"], value, _gap(grad, expected["grad_new"])
    expected = GRADIENTS["expected"]["k3"]
    value, grad = value_and_grad(kl_input(), make_config(kl_weight=1.0, kl_estimator="k3"))
    yield "KL k3 in the loss", expected["value"], value, _gap(grad, expected["grad_new"])
    x = forward_input()
    assert x.ref_logprobs is not None
    for estimator in ("k1", "k2", "k3"):
        kl = kl_divergence(x.policy_logprobs, x.ref_logprobs, estimator)[x.loss_mask].mean()
        yield f"KL {estimator}", ALGORITHMS["outputs"][f"kl_{estimator}_mean"], float(kl), None
    rewards = torch.tensor(GRADIENTS["inputs"]["rewards"], dtype=torch.float64)
    for kind, key in (("grpo", "adv_grpo"), ("dr_grpo", "adv_drgrpo"), ("rloo", "adv_rloo")):
        golden = torch.tensor(GRADIENTS["expected"][key]["value"], dtype=torch.float64)
        ours = advantages(rewards, kind, 4).double()
        worst = int((ours - golden).abs().argmax())
        yield f"advantages {kind}, worst of 16", float(golden[worst]), float(ours[worst]), None


def _named(key: str, changes: dict[str, object]) -> str:
    return f"{key} by {changes['name']}" if changes.get("name") == "decoupled_ppo" else key


def _gap(grad: torch.Tensor, golden: object) -> float:
    return float((grad - torch.tensor(golden).to(grad)).abs().max())


if __name__ == "__main__":
    print("| what | golden | here | difference | of gradients, largest |\n|---|---|---|---|---|")
    for what, golden, ours, gap in rows():
        of_gradient = "" if gap is None else f"{gap:.0e}"
        print(f"| {what} | {golden:.9f} | {ours:.9f} | {abs(golden - ours):.0e} | {of_gradient} |")
