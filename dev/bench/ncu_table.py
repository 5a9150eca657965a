"""Makes a table of kernels from ncu's measurements of a few steps (gpu_report.sh, item `step`); only the standard library.

    ncu --csv --print-units base --metrics gpu__time_duration.sum,dram__bytes.sum,... train_gpt2cu --graph off --steps 2 ...
    python dev/bench/ncu_table.py step-kernels.csv --steps 2

One row per kernel, the most expensive first: launches per step, microseconds and DRAM bytes per launch, GB/s,
milliseconds per step and their share, issued instructions, and the share of the tensor pipe.
"""

import argparse
import csv
from collections import defaultdict

TIME, BYTES = "gpu__time_duration.sum", "dram__bytes.sum"
ISSUED, TENSOR = "sm__inst_executed.sum", "sm__inst_executed_pipe_tensor.sum"


def read(path):
    """Returns the sums of each metric by kernel, and the number of its launches. ncu's own lines start with ==."""
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        rows = list(csv.DictReader(line for line in file if line.startswith('"')))
    sums, launches = defaultdict(lambda: defaultdict(float)), defaultdict(set)
    for row in rows:
        kernel = row["Kernel Name"].split("(")[0].removeprefix("void ")[:60]
        try:
            sums[kernel][row["Metric Name"]] += float(row["Metric Value"].replace(",", ""))
        except ValueError:  # n/a: this card does not have the metric
            continue
        launches[kernel].add(row["ID"])
    return sums, {kernel: len(ids) for kernel, ids in launches.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("csv")
    parser.add_argument("--steps", type=int, default=1, help="steps in the file: the table is of one")
    args = parser.parse_args()
    sums, launches = read(args.csv)
    total = sum(metrics[TIME] for metrics in sums.values())
    if not total:
        raise SystemExit(f"error: {args.csv}: no kernel with {TIME}")
    print("| kernel | launches | us each | MB each | GB/s | ms a step | share | M instructions | tensor |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for kernel, m in sorted(sums.items(), key=lambda item: -item[1][TIME]):
        n = launches[kernel]
        print(f"| {kernel} | {n / args.steps:g} | {m[TIME] / n * 1e-3:.1f} | {m[BYTES] / n * 1e-6:.1f} "
              f"| {m[BYTES] / m[TIME]:.0f} | {m[TIME] / args.steps * 1e-6:.3f} | {100 * m[TIME] / total:.1f} % "
              f"| {m[ISSUED] / n * 1e-6:.2f} | {100 * m[TENSOR] / max(m[ISSUED], 1):.1f} % |")
    print(f"| all | {sum(launches.values()) / args.steps:g} | | | | {total / args.steps * 1e-6:.3f} | 100 % | | |")


if __name__ == "__main__":
    main()
