"""log2 of what looks choose over the best c with decay from T/2 (interpolated by a parabola through the best three)"""
import math
import sys
from table import *
R, I = load(); ms = sys.argv[1].split(",")
for p in R:
    h = sorted((float(m[5:]), sum(s.values()) / len(s)) for m, s in R[p].items() if m.startswith("half@"))
    if not h: h = sorted((float(m[7:]), sum(s.values()) / len(s)) for m, s in R[p].items() if m.startswith("linear@"))
    cs = [c for c, _ in h]; a = [x for _, x in h]; k = max(range(len(a)), key=a.__getitem__); best_c = cs[k]
    if 0 < k < len(a) - 1:
        den = a[k - 1] - 2 * a[k] + a[k + 1]; best_c = cs[k] * 2 ** (.5 * (a[k - 1] - a[k + 1]) / den if den else 0)
    lo = min(c for c, x in h if x > max(a) - 1); hi = max(c for c, x in h if x > max(a) - 1)
    row = f"{p[:32]:33s} best {best_c:5.2f} ({lo:.2g}-{hi:.2g}) "
    for m in ms:
        L = [[math.log2(v["c"] / best_c) for v in I[p, m, s]["info"].values() if isinstance(v, dict)] for s in R[p].get(m, {})]
        row += "| " + " ".join(f"{sum(x)/len(x):+4.1f}" for x in zip(*L)) + " "
    print(row)
