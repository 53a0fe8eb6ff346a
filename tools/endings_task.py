"""Make an evaluation task of any text, for `caee run --lm-eval`: which of two endings goes on from here?

One is what follows in the text, the other is from elsewhere in it; guessing is right half of the time.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

TASK = """\
task: endings
dataset_path: json
dataset_kwargs:
  data_files:
    test: endings.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{endings}}"
doc_to_target: right
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--context", type=int, default=64, help="characters")
    parser.add_argument("--ending", type=int, default=16, help="characters")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    documents = endings(
        given.text.read_text(encoding="utf-8"), given.documents, given.context, given.ending, random.Random(given.seed)
    )
    given.output.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents)
    (given.output / "endings.jsonl").write_text(lines, encoding="utf-8")
    (given.output / "endings.yaml").write_text(TASK, encoding="utf-8")


def endings(text: str, count: int, context: int, ending: int, draw: random.Random) -> list[dict[str, object]]:
    """``count`` documents, spread evenly over ``text``; the wrong ending begins at a place drawn from all of it."""
    places = len(text) - context - ending
    documents: list[dict[str, object]] = []
    for number in range(count):
        start = number * places // count
        true = text[start + context :][:ending]
        wrong = true
        while wrong == true:
            wrong = text[draw.randrange(len(text) - ending) :][:ending]
        right = draw.randrange(2)
        pair = [wrong, true] if right else [true, wrong]
        documents.append({"context": text[start:][:context], "endings": pair, "right": right})
    return documents


if __name__ == "__main__":
    main()
