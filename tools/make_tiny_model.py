#!/usr/bin/env python3
"""Write a tiny, randomly initialised Qwen3-MoE (or Qwen3) with a tokenizer, in Hugging Face format.

The default is the demo's model: 4 MoE layers of 8 experts, top-2, and grouped-query attention with
q/k norms. Its hidden, query, key, MLP and expert widths all differ, so that a transposed or swapped
tensor cannot go unnoticed. The tokenizer spells arithmetic one character a token, and knows <think>
and </think>::

    python tools/make_tiny_model.py /tmp/tiny --seed 0
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

PAD, EOS, THINK, END_THINK, UNKNOWN = "<pad>", "<eos>", "<think>", "</think>", "<unk>"
CHARACTERS = "0123456789+-*/=().,"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """24 tokens: 4 marks, 19 characters, unknown. Spaces separate and vanish."""
    words = [PAD, EOS, THINK, END_THINK, *CHARACTERS, UNKNOWN]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.add_special_tokens([PAD, EOS])
    tokenizer.add_tokens([THINK, END_THINK])
    characters = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), characters]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN
    )


def build_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": args.hidden,
        "intermediate_size": args.ffn,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "max_position_embeddings": args.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": args.rope_theta},
        "tie_word_embeddings": args.tie,
        "initializer_range": args.init_std,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    torch.manual_seed(args.seed)
    if not args.experts:
        return Qwen3ForCausalLM(Qwen3Config(**common))
    config = Qwen3MoeConfig(
        **common,
        moe_intermediate_size=args.moe_ffn,
        num_experts=args.experts,
        num_experts_per_tok=args.topk,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=args.dense_layers,
        router_aux_loss_coef=0.0,
    )
    return Qwen3MoeForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=24)
    parser.add_argument("--ffn", type=int, default=128, help="width of a dense layer's MLP")
    parser.add_argument("--moe-ffn", type=int, default=40, help="width of one expert")
    parser.add_argument("--experts", type=int, default=8, help="0: a dense Qwen3")
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--dense-layers", type=int, nargs="*", default=[])
    parser.add_argument("--tie", action="store_true", help="tie the output layer to the embedding")
    parser.add_argument("--rope-theta", type=float, default=10000.0)
    parser.add_argument("--init-std", type=float, default=0.02)
    parser.add_argument("--max-positions", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"{args.out} already holds something")
    disable_progress_bar()
    tokenizer = build_tokenizer()
    model = build_model(args, tokenizer).to(getattr(torch, args.dtype))
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{args.out}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
