"""Small tasks of many kinds as flat arrays, split into train and validation parts (test parts are never read). Cached."""
import gzip, hashlib, io, os, re, sys, tarfile, time, csv, lzma
import numpy as np, torch, torch.nn.functional as F
D = "/work/shared/data"; CACHE = "/tmp/rule_data.pt"

def split(x, y, n=None, seed=0):
    """a fixed fifth is the test part and left alone, a fifth of the rest validation"""
    p = np.random.default_rng(seed).permutation(len(y)); p = p[: int(.8 * len(p))]
    if n: p = p[: int(n * 1.25)]
    k = int(.8 * len(p))
    t = lambda a, i: torch.as_tensor(np.ascontiguousarray(a[i]))
    return (t(x, p[:k]).float(), t(y, p[:k]).long()), (t(x, p[k:]).float(), t(y, p[k:]).long())

def build():
    out = {}
    from sklearn.datasets import load_digits, make_classification, load_breast_cancer
    x, y = load_digits(return_X_y=True); out["digits"] = split(x / 8 - 1, y)
    x, y = make_classification(9000, 40, n_informative=12, n_redundant=10, n_classes=5, class_sep=1.2, random_state=1); out["clf"] = split(x / 3, y)
    x, y = make_classification(12000, 30, n_informative=8, n_classes=2, weights=[.76], class_sep=.8, flip_y=.08, random_state=2); out["imb24"] = split(x / 3, y)
    from hyfreedp.experiments.data.glyphs import glyphs
    if os.path.exists("/tmp/glyphs.npz"): x, y = (lambda z: (z["x"], z["y"]))(np.load("/tmp/glyphs.npz"))
    else: x, y = glyphs(16000, 123); np.savez("/tmp/glyphs.npz", x=x, y=y)
    x = np.asarray(x, np.float32).reshape(len(x), -1); out["glyphs"] = split(x, y); out["glyphs_public"] = (torch.tensor(x), torch.tensor(y).long())
    print({k: (tuple(v[0][0].shape) if k != 'glyphs_public' else 0) for k, v in out.items()}, out['glyphs'][0][0].min(), out['glyphs'][0][0].max(), flush=True)
    from hyfreedp.experiments.data.bank import bank
    x, y = bank(); x, y = x.numpy(), y.numpy(); out["bank"] = split(x, y, 14000)
    yes, no = np.nonzero(y == 1)[0], np.nonzero(y == 0)[0]; i = np.random.default_rng(3).permutation(np.concatenate([yes, no[: int(len(yes) * .76 / .24)]])); out["bank24"] = split(x[i], y[i], 12000)
    rows = [l.split(",") for l in gzip.open(f"{D}/kinds/nursery.data.gz", "rt").read().split() if l]
    cols = list(zip(*rows)); X = np.concatenate([np.stack([[a == v for a in c] for v in sorted(set(c))], 1) for c in cols[:-1]], 1).astype(np.float32)
    cl = sorted(set(cols[-1])); out["nursery"] = split(X, np.array([cl.index(a) for a in cols[-1]]))
    r = np.array([[float(v.strip("\" \r")) for v in l.split(",")] for l in gzip.open(f"{D}/kinds/pendigits.csv.gz", "rt").read().split("\n")[1:] if l.strip()])
    out["pendigits"] = split((r[:, 1:17] / 50 - 1).astype(np.float32), r[:, -1].astype(int))
    S = [l for f in ("neg", "pos") for l in gzip.open(f"{D}/kinds/rt-polarity.{f}.gz", "rt", encoding="latin-1").read().strip().split("\n")]
    y = np.r_[np.zeros(5331), np.ones(5331)][: len(S)]; X = np.zeros((len(S), 2048), np.float32)
    for i, s in enumerate(S):
        for w in set(re.findall(r"[a-z']+", s.lower())): X[i, int(hashlib.md5(w.encode()).hexdigest(), 16) % 2048] = 1
    X /= np.sqrt(X.sum(1, keepdims=True)).clip(1); out["rt"] = split(X * 4, y)
    from PIL import Image
    C = "airplane automobile bird cat deer dog frog horse ship truck".split(); X, y = [], []
    with tarfile.open(f"{D}/cifar10/cifar10.tar.gz") as t:
        for m in t:
            if m.isfile() and m.name.startswith("train/") and int(m.name.split("/")[2][:4]) < 1500:
                X.append(np.asarray(Image.open(io.BytesIO(t.extractfile(m).read())).convert("RGB"))); y.append(C.index(m.name.split("/")[1]))
    X = torch.tensor(np.stack(X)).permute(0, 3, 1, 2).float() / 127.5 - 1; X16 = F.avg_pool2d(X, 2) * 1.5
    y = np.array(y); out["cifar"] = split(X16.flatten(1).numpy(), y)
    g = torch.Generator().manual_seed(5); K = torch.randn(256, 3, 6, 6, generator=g) / 6
    E = torch.cat([F.adaptive_avg_pool2d(F.relu(F.conv2d(b, K, stride=2)), 2).flatten(1) for b in X.split(500)]); E = (E - .5) ; E = E / E.std(); out["cifar_emb"] = split(E.numpy(), y)
    Q = np.frombuffer(lzma.open(f"{D}/gtsrb32/train_even.rgb.xz").read(), np.uint8).reshape(-1, 3, 32, 32)
    X = np.cumsum(np.cumsum(Q, 2, dtype=np.uint8), 3, dtype=np.uint8).copy(); X[:, 0] += X[:, 1]; X[:, 2] += X[:, 1]
    R = list(csv.DictReader(gzip.open(f"{D}/gtsrb32/train_even.csv.gz", "rt"))); y = np.array([int(r["label"]) for r in R]); tr = [r["file"].split("_")[0] for r in R]
    X = F.avg_pool2d(torch.tensor(X).float().mean(1, keepdim=True), 2) / 64 - 1.5
    u = sorted(set(tr)); p = dict(zip(u, np.random.default_rng(4).permutation(len(u)) / len(u))); a = np.array([p[t] for t in tr]); perm = np.random.default_rng(5).permutation(len(y)); a = a[perm]
    X, y = X.flatten(1)[perm], torch.tensor(y[perm])
    out["gtsrb"] = ((X[a < .64], y[a < .64]), (X[(a >= .64) & (a < .8)], y[(a >= .64) & (a < .8)]))
    # transfer: even classes are public, odd ones private
    pub = (y % 2 == 0) & (torch.tensor(a) < .8); out["gtsrb_public"] = (X[pub], y[pub] // 2)
    out["gtsrb_odd"] = tuple((xx[yy % 2 == 1], yy[yy % 2 == 1] // 2) for xx, yy in out["gtsrb"])
    torch.save(out, CACHE); return out
_d = None
def data():
    global _d
    if _d is None: _d = torch.load(CACHE) if os.path.exists(CACHE) else build()
    return _d
if __name__ == "__main__":
    t = time.time(); 
    for k, v in build().items(): print(k, [tuple(a[0].shape) if isinstance(a, tuple) else tuple(a.shape) for a in v], time.time() - t)
