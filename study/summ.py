"""python summ.py METHODS: summary over the places that all of them have (or: all methods)"""
import sys, fnmatch
from table import *
R, I = load(); every = []
for l in open(OUT):
    m = json.loads(l)["method"]
    if "@" not in m and m not in every: every.append(m)
pat = sys.argv[1].split(",") if len(sys.argv) > 1 else ["*"]; ms = [m for m in every if any(fnmatch.fnmatch(m, p) for p in pat)]
full = max(sum(m in R[p] for p in R) for m in ms); ms = [m for m in ms if sum(m in R[p] for p in R) >= full - int(__import__("os").environ.get("SLACK", 3))]
kinds = sorted({p.split(":")[0] for p in R})
print(" " * 22 + "mean  <1% worst n-5 | " + " ".join(f"{k:>6s}" for k in kinds))
for m in ms:
    if __import__("os").environ.get("COMMON"): R = {p: v for p, v in R.items() if all(x in v for x in ms)}
    G = {p: (lambda g: sum(g) / len(g))(gaps(R, p, m)) for p in R if m in R[p] and any("@" in x for x in R[p])}; v = list(G.values())
    print(f"{m:20s} {sum(v)/len(v):+6.2f} {100*sum(x>=-1 for x in v)/len(v):3.0f}% {min(v):+6.1f} {sum(x<-3 for x in v):3d} | " + " ".join(f"{(lambda b: sum(b)/max(1,len(b)))([g for p,g in G.items() if p.split(':')[0]==k]):+6.1f}" for k in kinds))
