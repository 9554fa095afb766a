"""Laws of router replay: the trainer's routers choose what was recorded, and compute the rest as they always do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from actors.model import Policy
from actors.packing import empty_micro_batch, micro_batches
from actors.router_replay import RouterReplay, check_routed
from actors.trainer import ModelSpec, Trainer, TrainerConfig
from forge.batch import make_group
from forge.errors import ConfigError, SchemaError
from forge.loss_config import LossConfig

LAYERS, EXPERTS, CHOSEN = 3, 8, 2
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": CHOSEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: dict[str, Any] = {
    **SMALL,
    "n_routed_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
FAMILIES: dict[str, Any] = {
    "qwen3_moe": transformers.Qwen3MoeConfig(**SMALL, num_experts=EXPERTS, norm_topk_prob=True),
    "qwen3_moe, a dense layer": transformers.Qwen3MoeConfig(**SMALL, num_experts=EXPERTS, mlp_only_layers=[1]),
    "qwen2_moe": transformers.Qwen2MoeConfig(**SMALL, num_experts=EXPERTS, shared_expert_intermediate_size=24),
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=EXPERTS),
    "olmoe": transformers.OlmoeConfig(**SMALL, num_experts=EXPERTS),
    "gpt_oss": transformers.GptOssConfig(**SMALL, num_local_experts=EXPERTS),
    "deepseek_v3": transformers.DeepseekV3Config(**{**GROUPED, **LATENT}),
    "glm4_moe": transformers.Glm4MoeConfig(**GROUPED),
}


def model(name: str = "qwen3_moe", **options: Any) -> Any:
    torch.manual_seed(0)
    options |= {"dtype": torch.float32, "attn_implementation": "eager"}
    hf: Any = AutoModelForCausalLM.from_config(FAMILIES[name], **options)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    return hf.eval()


def inputs(rows: int = 2, length: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(1, 64, (rows, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    return tokens, torch.arange(length).expand(rows, length), mask


def some_routes(rows: int = 2, length: int = 9, seed: int = 0) -> torch.Tensor:
    """`[R, L, layers, k]`: k different experts everywhere."""
    scores = torch.rand((rows, length, LAYERS, EXPERTS), generator=torch.Generator().manual_seed(seed))
    return scores.topk(CHOSEN, dim=-1).indices.short()


class Choices:
    """What the routers choose in each pass, by layer."""

    def __init__(self, hf: Any) -> None:
        self.ids: dict[int, torch.Tensor] = {}
        self.weights: dict[int, torch.Tensor] = {}
        self.logits: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(hf.model.layers):
            gate = getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None)
            if gate is not None:
                gate.register_forward_hook(lambda _, __, out, number=number: self._note(number, out))

    def _note(self, layer: int, out: Any) -> None:
        self.logits[layer], self.weights[layer], self.ids[layer] = out[0], out[1], out[-1]


@pytest.mark.parametrize("name", FAMILIES)
def test_routers_choose_what_was_recorded_and_where_nothing_was_for_themselves(name: str) -> None:
    hf = model(name)
    plain, _ = Policy(hf)(*inputs())
    choices = Choices(hf)
    policy = Policy(hf, replay_routes=True)
    assert torch.equal(policy(*inputs())[0], plain), "without routes nothing is different"
    own = {layer: ids.clone() for layer, ids in choices.ids.items()}

    routes = some_routes()
    routes[1, 3:] = -1
    replayed, _ = policy(*inputs(), None, routes)
    assert not torch.allclose(replayed, plain)
    assert choices.ids.keys() == own.keys()
    for layer, ids in choices.ids.items():
        by_row = ids.reshape(2, 8, CHOSEN).sort().values  # the last token is no input
        assert torch.equal(by_row[0], routes[0, :-1, layer].long().sort().values)
        assert torch.equal(by_row[1, :3], routes[1, :3, layer].long().sort().values)
    first = min(own)
    free = choices.ids[first].reshape(2, 8, CHOSEN)[1, 3:]
    if first == 0:  # nothing that was replayed lies before it
        assert torch.equal(free, own[first].reshape(2, 8, CHOSEN)[1, 3:])

    recorded = torch.full_like(routes, 0)
    for layer, ids in own.items():
        recorded[:, :-1, layer] = ids.reshape(2, 8, CHOSEN).short()
    torch.testing.assert_close(policy(*inputs(), None, recorded)[0], plain)
    assert torch.equal(policy(*inputs())[0], plain), "routes of one pass do not linger"


@pytest.mark.parametrize(("name", "normed"), [("qwen3_moe", True), ("mixtral", True), ("olmoe", False)])
def test_the_weights_of_replayed_experts_are_the_softmax_of_the_weights_of_now(name: str, normed: bool) -> None:
    hf = model(name)
    choices, policy = Choices(hf), Policy(hf, replay_routes=True)
    policy(*inputs(), None, some_routes())
    for layer, ids in choices.ids.items():
        expected = F.softmax(choices.logits[layer].double(), dim=-1).gather(-1, ids)
        if normed:
            expected = expected / expected.sum(dim=-1, keepdim=True)
        torch.testing.assert_close(choices.weights[layer].double(), expected, atol=1e-6, rtol=1e-5)


def test_routers_learn_from_what_is_replayed_also_when_activations_are_computed_again() -> None:
    grads = []
    for again in (False, True):
        hf = model().train()
        if again:
            hf.gradient_checkpointing_enable({"use_reentrant": False})
        logprobs, _ = Policy(hf, replay_routes=True)(*inputs(), None, some_routes())
        logprobs.sum().backward()
        grads.append([layer.mlp.gate.weight.grad for layer in hf.model.layers])
    assert all(bool(grad.abs().sum() > 0) for grad in grads[0])
    for kept, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(kept, recomputed)


def test_a_router_s_gradient_is_that_of_finite_differences() -> None:
    hf = model(experts_implementation="eager").double()
    policy, routes = Policy(hf, replay_routes=True), some_routes()
    weight = hf.model.layers[1].mlp.gate.weight
    policy(*inputs(), None, routes)[0].sum().backward()
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    sums = []
    with torch.no_grad():
        for step in (1e-3, -1e-3):  # families compute the scores in float32 whatever the model is in
            weight.add_(step * direction)
            sums.append(float(policy(*inputs(), None, routes)[0].sum()))
            weight.sub_(step * direction)
    assert (sums[0] - sums[1]) / 2e-3 == pytest.approx(float((weight.grad * direction).sum()), rel=2e-3)


def batch() -> Any:
    lengths = (6, 3, 5, 2)
    routes = [some_routes(1, 2 + n - 1, seed=n)[0] for n in lengths]
    return make_group(
        [9, 10],
        [list(range(3, 3 + n)) for n in lengths],
        [[-2.0] * n for n in lengths],
        [[0] * n for n in lengths],
        group_id=0,
        routes=routes,
    )


def test_both_kinds_of_passes_carry_the_routes_along_their_tokens() -> None:
    td = batch()
    for packing in (False, True):
        for cut in micro_batches(td, 20, packing=packing):
            assert cut.routed_experts is not None
            assert cut.routed_experts.shape == (*cut.tokens.shape, LAYERS, CHOSEN)
            for row, place in enumerate(cut.rows):
                length = int(td["lengths"][place])
                start = 0 if not packing else sum(int(td["lengths"][r]) for r in cut.rows[:row])
                there = cut.routed_experts[0 if packing else row, start : start + length]
                assert torch.equal(there, td["routed_experts"][place, :length])
                if not packing:
                    assert bool((cut.routed_experts[row, length:] == -1).all())
    spare = empty_micro_batch(td)
    assert spare.routed_experts is not None
    assert spare.routed_experts.shape[:2] == spare.tokens.shape


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_trains_under_the_recorded_routes(packing: bool, tmp_path: Any) -> None:
    hf = model()
    hf.save_pretrained(tmp_path)
    config = TrainerConfig(microbatch_tokens=20, packing=packing, lr=1e-3)
    td = batch()
    td["advantages"] = torch.tensor([1.0, -1.0, 0.5, -0.5])
    results = {}
    for kept in (True, False):
        trainer = Trainer(config, LossConfig(), ModelSpec(str(tmp_path), "float32", keep_routes=kept))
        seen = []
        for cut in micro_batches(td, 20, packing=packing):
            with torch.no_grad():
                values, _ = trainer.policy(*cut.inputs)
            out = torch.zeros(td["loss_mask"].shape)
            index, width = torch.tensor(cut.rows), cut.loss_mask.shape[1]
            out[index, :width] = cut.unpack(values)
            seen.append(out)
        results[kept] = torch.stack(seen).sum(dim=0)
        assert trainer.step(td).metrics["grad_norm"]
    expected = torch.zeros(td["loss_mask"].shape)
    alone = Policy(model(), replay_routes=True)
    for row, length in enumerate(td["lengths"].tolist()):
        one = slice(row, row + 1), slice(0, length)
        positions = torch.arange(length)[None]
        with torch.no_grad():
            values, _ = alone(td["tokens"][one], positions, td["loss_mask"][one], None, td["routed_experts"][one])
        expected[one] = expected[one].masked_scatter(td["loss_mask"][one], values)
    torch.testing.assert_close(results[True], expected, atol=2e-5, rtol=1e-5)
    assert not torch.allclose(results[False], expected, atol=1e-2)


def test_models_that_cannot_replay_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="keep_routes is true, but a qwen3 model is no mixture of experts"):
        check_routed(transformers.Qwen3Config())
    check_routed(FAMILIES["deepseek_v3"])
    dense = AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SMALL))
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM has no routers"):
        RouterReplay(dense)
    stubborn = model()
    gate = stubborn.model.layers[1].mlp.gate
    forward = gate.forward
    gate.forward = lambda hidden: (*forward(hidden)[:2], torch.zeros((len(hidden), CHOSEN), dtype=torch.int64))
    with pytest.raises(ConfigError, match="takes other experts in layer 1"):
        RouterReplay(stubborn)
    with pytest.raises(SchemaError, match="routed_experts has 2 layers, the model routes in layer 2"):
        Policy(model(), replay_routes=True)(*inputs(), None, some_routes()[:, :, :2])
