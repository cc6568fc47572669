"""Language models of the zoo, from the `transformers` package."""

# mypy: allow-subclassing-any
# To mypy, modules of PyTorch are of any type.

from typing import Any

import torch
import transformers
from _zoo import BATCH, SEQ, TOKENS, VOCAB, WIDTH, Network, ids, language, tokens
from torch import nn


def gpt2(layers: int) -> Network:
    """GPT-2 (Radford et al. 2019); the output projection is the token table."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=WIDTH, n_layer=layers, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **ids(),
    )  # fmt: skip
    return language(transformers.GPT2LMHeadModel(config))


def _encoder_sizes(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": layers,
        "num_attention_heads": 4, "intermediate_size": 4 * WIDTH, "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip


def _two_segments(module: nn.Module) -> Network:
    inputs, dims = tokens("input_ids", "token_type_ids")
    integers = {"input_ids": TOKENS, "token_type_ids": (0, 2)}
    return Network(module, inputs, dims, integers=integers)


def bert(layers: int) -> Network:
    """BERT with its masked-language head (Devlin et al. 2019)."""
    config = transformers.BertConfig(**_encoder_sizes(layers), use_cache=False)
    return _two_segments(transformers.BertForMaskedLM(config))


def albert(layers: int) -> Network:
    """ALBERT (Lan et al. 2020): one layer that is used again and again, a factorised table."""
    config = transformers.AlbertConfig(
        **_encoder_sizes(layers), embedding_size=16, num_hidden_groups=1,
        classifier_dropout_prob=0.0, **ids(),
    )  # fmt: skip
    return _two_segments(transformers.AlbertForMaskedLM(config))


def deberta_v2(layers: int) -> Network:
    """DeBERTa-v2 (He et al. 2021): attention of content and of relative positions in buckets."""
    config = transformers.DebertaV2Config(
        **_encoder_sizes(layers), type_vocab_size=0, relative_attention=True, position_buckets=8,
        max_relative_positions=16, norm_rel_ebd="layer_norm", share_att_key=True,
        pos_att_type=["p2c", "c2p"], position_biased_input=False, conv_kernel_size=3,
    )  # fmt: skip
    return language(transformers.DebertaV2ForMaskedLM(config))


def modernbert(layers: int) -> Network:
    """ModernBERT (Warner et al. 2024): rotary positions, every second layer sees all tokens."""
    config = transformers.ModernBertConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=64, global_attn_every_n_layers=2,
        local_attention=4, cls_token_id=1, sep_token_id=2, **ids(),
    )  # fmt: skip
    return language(transformers.ModernBertForMaskedLM(config))


def _llama_sizes(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "use_cache": False, **ids(),
    }  # fmt: skip


def llama(layers: int) -> Network:
    """Llama (Touvron et al. 2023) with two query heads to each key and value head."""
    return language(transformers.LlamaForCausalLM(transformers.LlamaConfig(**_llama_sizes(layers))))


def gemma2(layers: int) -> Network:
    """Gemma 2 (2024): scores and logits through tanh, every second layer sees four tokens back."""
    config = transformers.Gemma2Config(
        **_llama_sizes(layers), head_dim=8, query_pre_attn_scalar=8, sliding_window=4,
        attn_implementation="eager",  # the only one that caps the scores
    )  # fmt: skip
    return language(transformers.Gemma2ForCausalLM(config))


def gemma3(layers: int) -> Network:
    """Gemma 3's text model (2025): queries and keys normed, two bases of rotary positions."""
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(
        **_llama_sizes(layers), head_dim=8, query_pre_attn_scalar=8, sliding_window=4,
        layer_types=[kinds[i % 2] for i in range(layers)],
    )  # fmt: skip
    return language(transformers.Gemma3ForCausalLM(config))


def phi3(layers: int) -> Network:
    """Phi-3 (Abdin et al. 2024): queries, keys and values of one product, gate and up of one."""
    config = transformers.Phi3Config(
        **_llama_sizes(layers), sliding_window=None, resid_pdrop=0.0, embd_pdrop=0.0,
        attention_dropout=0.0,
    )  # fmt: skip
    return language(transformers.Phi3ForCausalLM(config))


class _Text(nn.Module):
    """The text model of a larger one, with a head."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        found = self.model(input_ids=input_ids, position_ids=position_ids)
        logits: torch.Tensor = self.head(found.last_hidden_state)
        return logits


def qwen2_vl(layers: int) -> Network:
    """Qwen2-VL's text model (Wang et al. 2024); positions of time, row and column are an input."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    config = transformers.models.qwen2_vl.Qwen2VLTextConfig(
        **_llama_sizes(layers), rope_parameters=rope
    )
    module = _Text(transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VLTextModel(config))
    inputs, dims = tokens("input_ids")
    inputs["position_ids"] = torch.zeros((3, BATCH, SEQ), dtype=torch.int64)
    dims["position_ids"] = {1: "batch", 2: "seq"}
    return Network(module, inputs, dims, integers={"input_ids": TOKENS, "position_ids": (0, 64)})


def opt(layers: int) -> Network:
    """OPT (Zhang et al. 2022): learned positions that begin at 2."""
    config = transformers.OPTConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, ffn_dim=4 * WIDTH, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=64, dropout=0.0, word_embed_proj_dim=16,
        use_cache=False, **ids(),
    )  # fmt: skip
    return language(transformers.OPTForCausalLM(config))


def falcon(layers: int) -> Network:
    """Falcon (Almazrouei et al. 2023): attention and feed-forward side by side, one key head."""
    config = transformers.FalconConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=4,
        max_position_embeddings=64, hidden_dropout=0.0, attention_dropout=0.0, use_cache=False,
        **ids(),
    )  # fmt: skip
    return language(transformers.FalconForCausalLM(config))


def bloom(layers: int) -> Network:
    """BLOOM (Le Scao et al. 2022): linear biases of the distance (ALiBi), no positions."""
    config = transformers.BloomConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, n_layer=layers, n_head=4, hidden_dropout=0.0,
        attention_dropout=0.0, use_cache=False, **ids(),
    )  # fmt: skip
    return language(transformers.BloomForCausalLM(config))


def mixtral(layers: int) -> Network:
    """Mixtral (Jiang et al. 2024): Llama with four experts, two to each token."""
    config = transformers.MixtralConfig(
        **_llama_sizes(layers), num_local_experts=4, num_experts_per_tok=2, sliding_window=None,
        experts_implementation="batched_mm",
    )  # fmt: skip
    return language(transformers.MixtralForCausalLM(config))


def qwen3_moe(layers: int) -> Network:
    """Qwen3-MoE (Yang et al. 2025): eight experts, two to each token, queries and keys normed."""
    config = transformers.Qwen3MoeConfig(
        **_llama_sizes(layers), head_dim=8, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=WIDTH, norm_topk_prob=True, experts_implementation="batched_mm",
    )  # fmt: skip
    return language(transformers.Qwen3MoeForCausalLM(config))


def _two_sequences(module: nn.Module) -> Network:
    """Tokens of an encoder and, in another number, of a decoder."""
    inputs = {
        "input_ids": torch.zeros(BATCH, SEQ, dtype=torch.int64),
        "decoder_input_ids": torch.zeros(BATCH, SEQ + 4, dtype=torch.int64),
    }
    dims = {
        "input_ids": {0: "batch", 1: "seq"},
        "decoder_input_ids": {0: "batch", 1: "target"},
    }
    return Network(module, inputs, dims, integers=dict.fromkeys(inputs, TOKENS))


def t5(layers: int) -> Network:
    """T5 (Raffel et al. 2020): relative positions in buckets, no biases."""
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=8, d_ff=3 * WIDTH, num_layers=layers, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
        use_cache=False,
        attn_implementation="eager", # PyTorch 2.13 cannot export the other form with a bias
    )  # fmt: skip
    return _two_sequences(transformers.T5ForConditionalGeneration(config))


def bart(layers: int) -> Network:
    """BART (Lewis et al. 2020)."""
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=WIDTH, max_position_embeddings=64,
        encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=3 * WIDTH, decoder_ffn_dim=3 * WIDTH,
        dropout=0.0, use_cache=False,
        decoder_start_token_id=2, **ids(),
    )  # fmt: skip
    return _two_sequences(transformers.BartForConditionalGeneration(config))


def mamba(layers: int) -> Network:
    """Mamba (Gu and Dao 2023); its scan is unrolled, so that the length is fixed, at 8 tokens."""
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, state_size=8, num_hidden_layers=layers,
        time_step_rank=4, use_cache=False, use_associative_scan=False, use_mambapy=False, **ids(),
    )  # fmt: skip
    return language(transformers.MambaForCausalLM(config), seq=8, fixed=True)


def mamba2(layers: int) -> Network:
    """Mamba-2 (Dao and Gu 2024): products over chunks of four tokens, and a scan of the chunks."""
    config = transformers.Mamba2Config(
        vocab_size=VOCAB, hidden_size=WIDTH, state_size=8, num_hidden_layers=layers, num_heads=8,
        head_dim=8, expand=2, n_groups=2, chunk_size=4, use_cache=False, **ids(),
    )  # fmt: skip
    return language(transformers.Mamba2ForCausalLM(config))


def rwkv(layers: int) -> Network:
    """RWKV-4 (Peng et al. 2023); its scan is unrolled, so that the length is fixed, at 8 tokens."""
    config = transformers.RwkvConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, attention_hidden_size=WIDTH, context_length=64,
        intermediate_size=4 * WIDTH, num_hidden_layers=layers, rescale_every=0, use_cache=False,
        **ids(),
    )  # fmt: skip
    return language(transformers.RwkvForCausalLM(config), seq=8, fixed=True)


NETWORKS = (
    gpt2, bert, llama, mixtral, qwen3_moe, t5, bart, mamba, albert, deberta_v2, modernbert, gemma2,
    gemma3, phi3, qwen2_vl, opt, falcon, bloom, mamba2, rwkv,
)  # fmt: skip
