import sys, json, collections, os
from go import OUT
def load():
    R = collections.defaultdict(lambda: collections.defaultdict(dict)); I = {}
    for l in open(OUT):
        r = json.loads(l); R[r["place"]][r["method"]][r["seed"]] = r["acc"]; I[r["place"], r["method"], r["seed"]] = r
    return R, I
def best(R, p):
    g = {m: sum(s.values()) / len(s) for m, s in R[p].items() if "@" in m and len(s) >= 2}
    m = max(g, key=g.get); return m, g[m]
def gaps(R, p, m):
    b, g = best(R, p); s = R[p][m]; ref = sum(R[p][b].values()) / len(R[p][b]); return [s[k] - R[p][b].get(k, ref) for k in s]
if __name__ == "__main__":
    R, I = load(); ms = sys.argv[1].split(",") if len(sys.argv) > 1 else []
    ps = [p for p in R if any("@" in m and len(s) >= 2 for m, s in R[p].items()) and all(m in R[p] for m in ms)]
    tot = collections.defaultdict(list)
    for p in ps:
        b, g = best(R, p); row = f"{p:36s} {b:13s}{g:6.1f} "
        lin = {m: sum(s.values()) / len(s) for m, s in R[p].items() if m.startswith("linear@") and len(s) >= 2}
        for m in ms:
            G = gaps(R, p, m); a = sum(G) / len(G); tot[m].append((a, p)); cs = [[v["c"] for k, v in I[p, m, k2]["info"].items() if isinstance(v, dict)] for k2 in R[p][m]]
            row += f"| {a:+6.1f} " + ("" if len(ms) > 6 else str(cs).replace(" ", "")[:34].ljust(34))
        if not ms: row += str({k[7:]: round(v - g, 1) for k, v in lin.items()}) + str({k: round(sum(v.values())/len(v) - g, 1) for k, v in R[p].items() if k.startswith("half@") and len(v)>1})
        print(row)
    for m in ms:
        v = [a for a, _ in tot[m]]; k = collections.defaultdict(list)
        for a, p in tot[m]: k[p.split(":")[0]].append(a)
        print(f"{m:24s} mean {sum(v)/len(v):+.2f} within1 {100*sum(x>=-1 for x in v)/len(v):.0f}% worst {min(v):+.1f} ", {a: round(sum(b) / len(b), 1) for a, b in k.items()})
