"""BERT and RoBERTa: post-norm encoders; the output projection and its norm stand beside the attention proper."""

from __future__ import annotations

from torch import nn

from curvlens.families.family import Attention, Family, attribute, has, projections

HEADS = {"cls": "head", "lm_head": "head", "classifier": "head", "qa_outputs": "head"}
MASKED_LM = {  # one bias, held by the head and by its decoder
    "transform.dense": "transform",
    "transform.LayerNorm": "norm",
    "decoder": "",
    "bias": "bias",
}
LAYER = {
    "attention": "attn",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "mlp.up",
    "output.dense": "mlp.down",
    "output.LayerNorm": "norm2",
}
# norms are counted in the order of use
CROSS_LAYER = {
    **LAYER,
    "crossattention": "cross",
    "crossattention.output.LayerNorm": "norm2",
    "output.LayerNorm": "norm3",
}


def _attention(module: nn.Module) -> Attention | None:
    head_dim = attribute(module, "self.attention_head_size")
    paths = ("self.query", "self.key", "self.value", "output.dense")
    causal = attribute(module, "self.is_causal")
    # up to version 4 of Transformers, a decoder has one class for both attentions, and positions may be relative
    if causal is None and attribute(module, "self.is_decoder") is False:
        causal = False
    between = ("position",) if has("self.distance_embedding")(module) else ()
    scale = head_dim and head_dim**-0.5
    return projections(module, head_dim, *paths, scale=scale, causal=causal, between=between)


def _family(name: str, prefix: str, child: str) -> Family:
    return Family(
        name,
        names={
            f"{prefix}Model": {
                "embeddings.word_embeddings": "embed.token",
                "embeddings.position_embeddings": "embed.position",
                "embeddings.token_type_embeddings": "embed.type",
                "embeddings.LayerNorm": "embed.norm",
                "encoder.layer.*": "layer.*",
                "pooler.dense": "pooler",
            },
            f"{prefix}PreTrainedModel": {child: "", **HEADS},
            has("attention", "crossattention", "intermediate"): CROSS_LAYER,
            f"{prefix}Layer": LAYER,
            f"{prefix}LMPredictionHead": MASKED_LM,
            f"{prefix}PreTrainingHeads": {"predictions": "", "seq_relationship": "pair"},
            f"{prefix}Only*Head": {"predictions": "", "seq_relationship": "pair"},
            f"{prefix}LMHead": {"dense": "transform", "layer_norm": "norm", "decoder": "", "bias": "bias"},
            f"{prefix}ClassificationHead": {"dense": "transform", "out_proj": ""},
        },
        attention={f"{prefix}Attention": _attention},
    )


FAMILIES = [
    _family("bert", "Bert", "bert"),
    _family("roberta", "*Roberta", "roberta"),  # and XLM-RoBERTa
    _family("camembert", "Camembert", "roberta"),
]
