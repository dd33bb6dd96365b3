"""leave one kind out: the setting with the best mean over the other kinds (kinds weigh alike), and how it does on the left-out one"""
import sys, fnmatch
from table import *
R, I = load(); pats = sys.argv[1].split(","); every = sorted({m for p in R for m in R[p] if "@" not in m and any(fnmatch.fnmatch(m, q) for q in pats)})
n = max(sum(m in R[p] for p in R) for m in every); every = [m for m in every if sum(m in R[p] for p in R) == n]
G = {m: {p: sum(g) / len(g) for p in R if m in R[p] for g in [gaps(R, p, m)]} for m in every}; kinds = sorted({p.split(":")[0] for p in R})
K = {m: {k: (lambda v: sum(v) / len(v))([g for p, g in G[m].items() if p.startswith(k + ":")]) for k in kinds} for m in every}
print(len(every), "settings"); tot = []
for k in kinds:
    m = max(every, key=lambda m: sum(K[m][j] for j in kinds if j != k)); best = max(every, key=lambda m: K[m][k]); v = [g for p, g in G[m].items() if p.startswith(k + ":")]; tot += v
    print(f"{k:6s} chosen by the others {m:12s} mean {K[m][k]:+.2f} worst {min(v):+.1f} (best there: {best} {K[best][k]:+.2f})")
print(f"all left-out places: mean {sum(tot)/len(tot):+.2f} within 1 {100*sum(x>=-1 for x in tot)/len(tot):.0f}% worst {min(tot):+.1f}")
