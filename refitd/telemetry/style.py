"""How the status page looks: light and dark as the reader's system is set, readable at a laptop's width, no assets."""

STYLE = """
:root{color-scheme:light dark;--bg:#fafaf9;--card:#fff;--ink:#1c1917;--dim:#57534e;--line:#e7e5e4;--good:#15803d;
--bad:#b91c1c;--warn:#a16207;--heat:37 99 235;--offer:#78716c;--prepare:#b45309;--transfer:#2563eb;--verify:#0e7490;
--commit:#15803d;--apply:#7e22ce}
@media (prefers-color-scheme:dark){:root{--bg:#171412;--card:#211d1b;--ink:#f5f5f4;--dim:#a8a29e;--line:#3a3532;
--good:#4ade80;--bad:#f87171;--warn:#facc15;--heat:96 165 250;--offer:#a8a29e;--prepare:#f59e0b;--transfer:#60a5fa;
--verify:#22d3ee;--commit:#4ade80;--apply:#c084fc}}
*{box-sizing:border-box}
body{margin:0 auto;padding:20px 24px 48px;max-width:1320px;background:var(--bg);color:var(--ink);
font:14px/1.45 Inter,system-ui,sans-serif}
h1{font-size:20px;margin:0}
h2{font-size:16px;margin:28px 0 8px}
h3{font-size:13px;margin:0 0 8px;color:var(--dim);font-weight:600}
header{display:flex;flex-wrap:wrap;gap:4px 16px;align-items:baseline}
header span,p{color:var(--dim);margin:0}
section{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px 16px;margin:12px 0}
.pair{display:flex;flex-wrap:wrap;gap:0 12px}
.pair section{flex:1 1 auto;max-width:100%}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%}
th{text-align:left;font-weight:600;color:var(--dim);font-size:12px}
td,th{padding:4px 16px 4px 0;vertical-align:top;border-bottom:1px solid var(--line);white-space:nowrap;width:1%}
td:last-child,th:last-child{padding-right:0}
.t{white-space:normal;overflow-wrap:anywhere;width:auto;min-width:220px}
tr:last-child td{border-bottom:0}
.n{text-align:right;font-variant-numeric:tabular-nums}
.good{color:var(--good);font-weight:600}
.bad{color:var(--bad);font-weight:600}
.warn{color:var(--warn);font-weight:600}
.faults{border-color:var(--bad);border-left-width:5px}
.well{border-color:var(--good);border-left-width:5px}
ul{margin:0;padding-left:18px;overflow-wrap:anywhere}
.bar{display:flex;height:16px;margin-top:2px;min-width:220px;background:var(--line);border-radius:3px;overflow:hidden}
.bar i{display:block;min-width:1px}
.key{display:flex;flex-wrap:wrap;gap:4px 14px;color:var(--dim);font-size:12px;margin-top:8px}
.key i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
.offer{background:var(--offer)}.prepare{background:var(--prepare)}.transfer{background:var(--transfer)}
.verify{background:var(--verify)}.commit{background:var(--commit)}.apply{background:var(--apply)}
.heat td,.heat th{border:1px solid var(--card);padding:4px 8px;text-align:right;font-size:12px}
.heat{width:auto}
.heat td{min-width:84px;font-variant-numeric:tabular-nums}
.late{outline:2px solid var(--bad);outline-offset:-2px}
"""
