"""python go.py grid | rule NAME JSON ... : append records (one JSON line a run), skipping those there"""
import sys, json, os, math, time
from core import *; import places; P = places.FRESH if os.environ.get('FRESH') else places.P
OUT = os.environ.get("OUT", HERE + "/records.jsonl"); LIGHT = os.environ.get("ONLY")
def done():
    out = set()
    if os.path.exists(OUT):
        for l in open(OUT):
            r = json.loads(l); out.add((r["place"], r["method"], r["seed"]))
    return out
def key(p): return f"{p[0]}:{p[1]}:{p[2]}:{p[3]}:{p[4]}"
def go(jobs):
    have = done()
    for p, method, seed, kw in jobs:
        k = key(p)
        if (k, method, seed) in have: continue
        t0 = time.process_time(); a, l, info = run(p[1], p[2], p[3], seed, opt=p[4], **kw)
        open(OUT, "a").write(json.dumps(dict(place=k, method=method, seed=seed, acc=round(a, 3), loss=round(l, 4) if math.isfinite(l) else None, sec=round(time.process_time() - t0, 2), info={str(a): b for a, b in info.items()}, kw={a: b for a, b in kw.items()})) + "\n")
def sel(): return [p for p in P if not LIGHT or any(s in key(p) for s in LIGHT.split(","))]
CS = [2.4 / 2 ** j for j in range(8)]
if __name__ == "__main__":
    seeds = [int(s) for s in os.environ.get("SEEDS", "0,1").split(",")]
    if sys.argv[1] == "grid":
        # seed 0 everywhere, then seed 1 within 4 points of the best
        for p in sel():
            if p[3] >= 1000: cs = CS[1:6]
            else: cs = CS
            scheds = ("linear", "const", "half") if p[3] < 1000 else ("linear", "const")
            go([(p, f"{s}@{c:.4g}", seeds[0], dict(sched=s, c=c)) for s in scheds for c in cs])
            R = {}
            for l in open(OUT):
                r = json.loads(l)
                if r["place"] == key(p) and "@" in r["method"] and r["seed"] == seeds[0]: R[r["method"]] = r["acc"]
            top = max(R.values())
            go([(p, f"{s}@{c:.4g}", sd, dict(sched=s, c=c)) for sd in seeds[1:] for s in scheds for c in cs if R[f"{s}@{c:.4g}"] > top - 4])
    else:
        # NAME=JSON pairs: rule settings; 'sched' is taken out
        for a in sys.argv[2:]:
            n, j = a.split("=", 1); kw = json.loads(j); s = kw.pop("sched", "linear")
            go([(p, n, sd, dict(sched=s, rule=kw)) for p in sel() for sd in seeds])
