"""sentence-transformers: a tiny model, trained with a chain, and a resumed run."""

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import StaticEmbedding
from sentence_transformers.training_args import SentenceTransformerTrainingArguments
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PrinterCallback

from torchzero_clip import LR, Adam, WeightDecay, ZClip, optimizer_class

Clipped = optimizer_class(ZClip(warmup_steps=2), Adam(), WeightDecay(0.0), LR(1e-3))

words = ["the", "ship", "left", "harbour", "at", "noon", "boat", "sailed"]
reader = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="the"))
reader.pre_tokenizer = pre_tokenizers.Whitespace()
firsts, seconds = [f"the {word} left" for word in words], [f"{word} at noon" for word in words]
pairs = Dataset.from_dict({"first": firsts * 3, "second": seconds * 3})
args = SentenceTransformerTrainingArguments(
    output_dir="out",
    max_grad_norm=0,  # the chain clips
    max_steps=6,
    save_steps=3,
    per_device_train_batch_size=4,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)


def start():
    torch.manual_seed(1)
    model = SentenceTransformer(modules=[StaticEmbedding(reader, embedding_dim=16)], device="cpu")
    made = {"optimizer_cls_and_kwargs": (Clipped, {"lr": 1e-2})}
    loss = MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model, args, train_dataset=pairs, loss=loss, **made)
    trainer.remove_callback(PrinterCallback)
    return trainer


run, resumed = start(), start()
run.train()
resumed.train(resume_from_checkpoint="out/checkpoint-3")
print(all(map(torch.equal, run.model.parameters(), resumed.model.parameters())))
# → True
