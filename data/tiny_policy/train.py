"""Make the tiny policy in this folder: a 1 M parameter Qwen3 that can half do two-digit sums, so GRPO has work to do.

    python data/tiny_policy/train.py            # about two and a half minutes on two cores; overwrites the files beside it

Supervised training on `a+b=` -> the sum, loss on the answer only, stopped where about a third of sampled answers to
held-out sums are right. The transition is sharp (from 13 % to 59 % in 100 steps), so the step at which to stop is fixed
rather than a time. The head is untied from the embedding: AutoModel then makes each an FSDP unit of its own.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from toolkit.prompts import arithmetic, make_batch
from toolkit.rewards import exact_match

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz \n+-*/=?.,;:!()[]{}<>\"'#$%&@_|"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; 96 in all, which divides by every tensor-parallel size up to 4."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    assert len(vocab) == 96
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=96,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            rope_theta=10_000.0,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def encode(tokenizer: PreTrainedTokenizerFast, problems: list[tuple[str, str]], side: str = "prompt"):
    prompts = [tokenizer(p)["input_ids"] for p, _ in problems]
    answers = [tokenizer(a, add_special_tokens=False)["input_ids"] + [2] for _, a in problems]
    return make_batch([p + a for p, a in zip(prompts, answers, strict=False)], [len(p) for p in prompts], 0, side=side)


@torch.no_grad()
def accuracy(model, tokenizer, problems, *, greedy: bool, generator: torch.Generator) -> float:
    prompts = [tokenizer(p)["input_ids"] for p, _ in problems]
    batch = make_batch(prompts, [len(p) for p in prompts], 0)
    ids, mask = batch.ids_BT, batch.mask_BT
    for _ in range(5):
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1]
        new = logits.argmax(-1) if greedy else torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        ids, mask = torch.cat([ids, new[:, None]], 1), torch.cat([mask, torch.ones_like(new[:, None])], 1)
    right = 0.0
    for row, (prompt, answer) in zip(ids[:, batch.ids_BT.shape[1] :].tolist(), problems, strict=False):
        completion = row[: row.index(2)] if 2 in row else row
        right += exact_match(prompt, tokenizer.decode(completion), answer)
    return right / len(problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--eval-every", type=int, default=25)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer, model, task = make_tokenizer(), make_model(), arithmetic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 50))
    generator = torch.Generator().manual_seed(0)
    started, seconds, table = time.perf_counter(), time.process_time(), []
    for step in range(1, args.steps + 1):
        picks = torch.randint(len(task.problems), (256,), generator=generator).tolist()
        batch = encode(tokenizer, [task.problems[i] for i in picks])
        logits = model(input_ids=batch.ids_BT, attention_mask=batch.mask_BT, position_ids=batch.positions_BT).logits
        targets = batch.ids_BT[:, 1:].masked_fill(batch.token_mask_BT[:, 1:] == 0, -100)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        if step % args.eval_every == 0 or step == args.steps:
            model.eval()
            row = {
                "step": step,
                "loss": round(loss.item(), 4),
                "held_out_sampled": round(accuracy(model, tokenizer, task.held_out, greedy=False, generator=generator), 4),
                "held_out_greedy": round(accuracy(model, tokenizer, task.held_out, greedy=True, generator=generator), 4),
            }
            model.train()
            table.append(row)
            print(f"{time.perf_counter() - started:6.1f} s", row, flush=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    record = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "held_out_problems": len(task.held_out),
        "steps": args.steps,
        "cpu_seconds": round(time.process_time() - seconds),
        "accuracy": table[-1],
        "history": table,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
