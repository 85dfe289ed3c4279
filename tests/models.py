"""Tiny random models of every family, `MODELS[name]() -> (model, batch)`, in float64 and evaluation mode.

Weights are of order one, biases and norms away from 0 and 1, so that every Hessian block has digits. Batches are
uneven: sequences of 5, 3 and 4 tokens padded to 5, padding masked and not scored. `batch` is a dict as Hugging Face
takes it, or `(inputs, targets)`, where the model maps inputs to logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from curvlens import digits, nets

MODELS: dict[str, Callable[[], tuple[nn.Module, object]]] = {}
VOCABULARY, TOKENS, WIDTH, HIDDEN = 11, 5, 8, 12
LENGTHS = (5, 3, 4)


def _model(build):
    def ready():
        generator = torch.Generator().manual_seed(1)
        model, batch = build()
        return randomise(model.double().eval(), generator), batch

    MODELS[build.__name__] = ready
    return build


@torch.no_grad()
def randomise(model: nn.Module, generator: torch.Generator) -> nn.Module:
    for name, parameter in model.named_parameters():
        draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.dim() >= 2:
            parameter.copy_(0.5 * draw)
        else:
            parameter.copy_(0.3 * draw + (1.0 if name.endswith("weight") else 0.0))
    return model


def names_of_layers(count: int, names: str, prefix: str = "layer") -> list[str]:
    """`layer.0.` and so on before each of the names, which blanks separate."""
    return [f"{prefix}.{i}.{name}" for i in range(count) for name in names.split()]


# -- batches


def tokens(seed: int = 0) -> dict[str, torch.Tensor]:
    """Ids and mask, padded on the right with token 0, which occurs nowhere else."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (len(LENGTHS), TOKENS), generator=generator)
    mask = (torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def language(seed: int = 0) -> dict[str, torch.Tensor]:
    batch = tokens(seed)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def classes(seed: int = 0) -> dict[str, torch.Tensor]:
    return {**tokens(seed), "labels": torch.tensor([1, 0, 1])}


def ids_and_targets(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    batch = language(seed)
    return batch["input_ids"], batch["labels"]


# -- Hugging Face


def _config(kind: str, **more):
    import transformers

    common = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return getattr(transformers, kind + "Config")(**{**common, **more})


def _gpt2(head: str, **more) -> nn.Module:
    import transformers

    sizes = {"n_positions": 8, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_inner": HIDDEN}
    config = _config("GPT2", **sizes, **more)
    return getattr(transformers, f"GPT2{head}")(config)


def _usual(kind: str, head: str, **more) -> nn.Module:
    import transformers

    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": HIDDEN,
        "max_position_embeddings": 16,
    }
    return _exact(getattr(transformers, kind + head)(_config(kind, **{**sizes, **more})))


def _exact(model: nn.Module) -> nn.Module:
    """The model with RMSNorm in its own precision: that of Transformers always computes in float32."""

    def forward(self, x):
        eps = getattr(self, "variance_epsilon", None)
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    for module in model.modules():
        kind = type(module)
        if kind.__name__.endswith("RMSNorm") or kind.__name__ == "T5LayerNorm":
            module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model


@_model
def gpt2():
    return _gpt2("LMHeadModel"), language()


@_model
def gpt2_classifier():
    return _gpt2("ForSequenceClassification"), classes()


@_model
def gpt2_cross():
    """Attends to states as well, which the batch gives; weights of the head are tied as in every GPT-2."""
    states = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    model = _gpt2("LMHeadModel", add_cross_attention=True, scale_attn_by_inverse_layer_idx=True)
    return model, {**language(), "encoder_hidden_states": states}


@_model
def gpt_neox():
    return _usual("GPTNeoX", "ForCausalLM", rotary_pct=0.5), language()


@_model
def llama():
    grouped = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return _usual("Llama", "ForCausalLM", **grouped, attention_bias=True, mlp_bias=True), language()


@_model
def llama_classifier():
    return _usual("Llama", "ForSequenceClassification"), classes()


@_model
def mistral():
    # one key and value for all heads, heads wider than the model's width would give
    return _usual("Mistral", "ForCausalLM", num_key_value_heads=1, head_dim=6), language()


@_model
def qwen2():
    grouped = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return _usual("Qwen2", "ForCausalLM", **grouped, tie_word_embeddings=True), language()


@_model
def qwen3():
    grouped = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    return _usual("Qwen3", "ForCausalLM", **grouped), language()


@_model
def bert():
    return _usual("Bert", "ForMaskedLM"), language()


@_model
def bert_classifier():
    return _usual("Bert", "ForSequenceClassification"), classes()


@_model
def roberta():
    return _usual("Roberta", "ForMaskedLM"), language()


@_model
def roberta_classifier():
    return _usual("Roberta", "ForSequenceClassification"), classes()


@_model
def vit():
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(3, 2, 4, 4, generator=generator, dtype=torch.float64)
    model = _usual("ViT", "ForImageClassification", image_size=4, patch_size=2, num_channels=2)
    return model, {"pixel_values": images, "labels": torch.tensor([0, 1, 1])}


def _t5(head: str, **more) -> nn.Module:
    import transformers

    sizes = {"d_model": WIDTH, "d_kv": 3, "d_ff": HIDDEN, "num_layers": 2, "num_heads": 2}
    special = {"relative_attention_num_buckets": 6, "decoder_start_token_id": 0, "eos_token_id": 2}
    return _exact(getattr(transformers, f"T5{head}")(_config("T5", **sizes, **special, **more)))


@_model
def t5():
    return _t5("ForConditionalGeneration"), language()


@_model
def t5_gated():
    more = {"feed_forward_proj": "gated-gelu", "num_labels": VOCABULARY}
    return _t5("ForTokenClassification", **more), language()


# -- torch.nn, inside of a user's module


class TorchLM(nn.Module):
    def __init__(self, norm_first: bool = True):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, HIDDEN, dropout=0.0, batch_first=True, norm_first=norm_first, activation="gelu"
        )
        self.body = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.readout = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
        return self.readout(self.body(self.embed(ids), mask=mask, is_causal=True))


class TorchTranslator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 1, 2, HIDDEN, dropout=0.0, batch_first=True)
        self.readout = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.readout.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
        return self.readout(self.transformer(x.flip(1), x, tgt_mask=mask, tgt_is_causal=True))


class Perceiver(nn.Module):
    """One cross-attention with keys and values of other widths than its queries, an extra key and value."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Embedding(VOCABULARY, WIDTH)
        self.keys = nn.Embedding(VOCABULARY, 3)
        self.values = nn.Embedding(VOCABULARY, 5)
        self.look = nn.MultiheadAttention(
            WIDTH, 2, kdim=3, vdim=5, add_bias_kv=True, add_zero_attn=True, batch_first=True
        )
        self.readout = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        found, _ = self.look(self.queries(ids), self.keys(ids), self.values(ids), need_weights=False)
        return self.readout(found)


@_model
def torch_encoder():
    return TorchLM(), ids_and_targets()


@_model
def torch_transformer():
    return TorchTranslator(), ids_and_targets()


@_model
def torch_attention():
    return Perceiver(), ids_and_targets()


# -- after nanoGPT


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_embd, self.n_head = WIDTH, 2
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (
            part.unflatten(2, (self.n_head, -1)).transpose(1, 2)
            for part in self.c_attn(x).split(WIDTH, dim=2)
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ v
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = CausalSelfAttention()
        self.ln_2 = nn.LayerNorm(WIDTH, bias=False)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, HIDDEN), "c_proj": nn.Linear(HIDDEN, WIDTH)})

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](torch.nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class NanoGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(8, WIDTH),
                "h": nn.ModuleList(Layer() for _ in range(2)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, ids):
        x = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(ids.shape[1]))
        for layer in self.transformer["h"]:
            x = layer(x)
        return self.lm_head(self.transformer["ln_f"](x))


@_model
def nanogpt():
    return NanoGPT(), ids_and_targets()


# -- the package's own


@_model
def own_gpt():
    net = nets.GPT(VOCABULARY, TOKENS, WIDTH, 2, 2, hidden=HIDDEN, activation="gelu", norm="pre", bias=True)
    return net, ids_and_targets()


@_model
def own_tied():
    net = nets.GPT(
        VOCABULARY, TOKENS, WIDTH, 1, 2, key_width=6, activation=None, norm="post", causal=False, tied=True
    )
    return net, ids_and_targets()


@_model
def own_linear_attention():
    return nets.GPT(VOCABULARY, TOKENS, WIDTH, hidden=HIDDEN, attention="linear"), ids_and_targets()


@_model
def digit_addition():
    net = nets.GPT(digits.VOCABULARY, digits.LENGTH, WIDTH)
    return net, digits.batches(1, size=3)[0]


@_model
def linear_mlp():
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    return nets.LinearMLP([4, 6, 3]), (x, x @ torch.ones(4, 3, dtype=torch.float64))
