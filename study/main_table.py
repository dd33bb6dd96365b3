"""python main_table.py METHODS : the markdown table of places"""
import sys
from table import *
R, I = load(); ms = sys.argv[1].split(",")
print("| place | best of grid | score | " + " | ".join(ms) + " |\n|" + "---|" * (len(ms) + 3))
for p in R:
    if not any("@" in m for m in R[p]): continue
    b, g = best(R, p); print(f"| {p.replace(':adamw','')} | {b} | {g:.1f} | " + " | ".join((lambda v: f"{sum(v)/len(v):+.1f}")(gaps(R, p, m)) if m in R[p] else "" for m in ms) + " |")
