"""Is the second model better than the first? The same problems, paired, with a p-value."""

import argparse

import estr

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=40, help="optimizer steps of the second model")
parser.add_argument("--problems", type=int, default=256)
parser.add_argument("--runs", default="runs")
options = parser.parse_args()

final = {"every": 0, "final_problems": min(256, options.problems)}
run = estr.train({"name": "second", "steps": options.steps, "eval": final}, runs=options.runs)
print(f"trained in {run.folder}: {run.steps} steps, version {run.version}")

first, second, difference = estr.compare(
    "builtin", run.model_last, task="calculator", problems=options.problems
)
for name, result in (("builtin", first), ("trained", second)):
    low, high = result.avg_interval
    print(f"{name:8} {result.avg_at_k:.3f} [{low:.3f}, {high:.3f}] on {result.num_problems}")
low, high = difference.interval
print(f"difference {difference.difference:+.3f} [{low:+.3f}, {high:+.3f}]", end=", ")
print(f"p = {difference.p_value:.4f}")
