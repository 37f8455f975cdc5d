"""TRL: supervised fine-tuning of a tiny model, with a chain that the trainer creates."""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, PrinterCallback
from trl import SFTConfig, SFTTrainer

from torchzero_clip import LR, Adam, WeightDecay, ZClip, optimizer_class

Clipped = optimizer_class(ZClip(), Adam(), WeightDecay(0.0), LR(1e-3))

words = ["<end>", "the", "ship", "left", "harbour", "at", "noon"]
vocabulary = {word: i for i, word in enumerate(words)}
reader = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
reader.pre_tokenizer = pre_tokenizers.Whitespace()
special = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<end>")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=reader, **special)
sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": len(words)}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

args = SFTConfig(
    output_dir="out",
    max_grad_norm=0,  # the chain clips
    max_steps=4,
    learning_rate=1e-2,
    per_device_train_batch_size=2,
    report_to=[],
    use_cpu=True,
    bf16=False,
    disable_tqdm=True,
)
texts = Dataset.from_dict({"text": ["the ship left the harbour at noon"] * 16})
made = {"optimizer_cls_and_kwargs": (Clipped, {"lr": args.learning_rate})}
trainer = SFTTrainer(model, args, train_dataset=texts, processing_class=tokenizer, **made)
trainer.remove_callback(PrinterCallback)
trainer.train()
groups = trainer.optimizer.param_groups  # one that decays, one that does not
print([(group["weight_decay"], int(group["chain"]["ZClip/count"])) for group in groups])
# → [(0.0, 4), (0.0, 4)]
