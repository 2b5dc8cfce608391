"""A tokenizer whose text of token 7 is "7", for models that have none."""

from pathlib import Path


def write_tokenizer(folder: Path, vocab: int, eos: int) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(i): i for i in range(vocab)}
    spelled = Tokenizer(models.WordLevel(words, unk_token="0"))
    spelled.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=spelled, eos_token=str(eos))
    made.save_pretrained(folder)
    return folder
