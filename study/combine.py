"""choice loss: gap of half@c (interpolated) to half's best, for weighted log means of a prior and looks"""
import sys, math, itertools
import numpy as np
from table import *
R, I = load()
def curve(p):
    for s in ("half", "linear"):
        h = sorted((math.log2(float(m.split("@")[1])), sum(v.values()) / len(v)) for m, v in R[p].items() if m.startswith(s + "@"))
        if h: break
    x, y = map(np.array, zip(*h)); return x, y - y.max()
def loss(p, lc): x, y = curve(p); return float(np.interp(lc, x, y))
ps = [p for p in R if ":inf:" not in p]
def cs(p, m, k=-1): return [math.log2([v for v in I[p, m, s]["info"].values() if isinstance(v, dict)][k]["c"]) for s in sorted(R[p][m])]
def ev(name, f):
    L = {p: np.mean([loss(p, c) for c in f(p)]) for p in ps}; v = list(L.values()); kinds = sorted({p.split(":")[0] for p in ps})
    print(f"{name:40s} mean {np.mean(v):+.2f} <1 {100*np.mean(np.array(v)>=-1):3.0f}% worst {min(v):+6.1f} | " + " ".join(f"{k} {np.mean([L[p] for p in ps if p.startswith(k+':')]):+.1f}" for k in kinds))
if __name__ == "__main__":
    for c0 in (.1, .15, .2, .3, .4, .6): ev(f"prior {c0}", lambda p: [math.log2(c0)])
    looks = {"one": ("one", -1), "h.p": ("h.p", -1), "h.16": ("h.p.16", -1), "h.25": ("h.p.25", -1), "one.16b": ("one.16", -1), "h.p2b":("h.p.2",-1)}
    for n, a in looks.items():
        for w in (1, .75, .5, .25):
            for c0 in (.2, .3, .4): 
                if w < 1 or c0 == .3: ev(f"{w} {n} + prior {c0}", lambda p: [w * c + (1 - w) * math.log2(c0) for c in cs(p, *a)])
    for n1, n2 in (("one", "h.p"), ("one", "h.16"), ("one", "h.25"), ("h.p", "h.25"), ("one", "one.16b")):
        for w1, w2 in ((.5, .5), (.33, .33), (.25, .5), (.4, .4),(.25,.25)):
            ev(f"{w1} {n1} {w2} {n2} prior .3", lambda p: [w1 * a + w2 * b + (1 - w1 - w2) * math.log2(.3) for a, b in zip(cs(p, *looks[n1]), cs(p, *looks[n2]))])
