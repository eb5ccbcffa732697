"""The report's CSS, which is a part of the page."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--page:#f6f6f3;--card:#fff;--ink:#1b1f24;--soft:#626b76;--rule:#dfe1e0;--accent:#0b6b8f;
--second:#b4540a;--third:#6a4fb3;--wash:#e6f1f5}
@media (prefers-color-scheme:dark){:root{--page:#14171a;--card:#1c2024;--ink:#e7e9eb;--soft:#9aa4ae;--rule:#32383e;
--accent:#5bbbe0;--second:#f0a35e;--third:#b3a0f0;--wash:#1b313a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;font-variant-numeric:tabular-nums;
-webkit-text-size-adjust:100%}
main{max-width:1080px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:30px;line-height:1.2;letter-spacing:-.015em;margin:0 0 6px;overflow-wrap:anywhere}
h2{font-size:19px;letter-spacing:-.005em;margin:44px 0 12px}
p{margin:0 0 12px;max-width:72ch}
.soft,.note,.legend,summary{color:var(--soft)}
.warning{border-left:4px solid var(--second);background:var(--card);padding:10px 14px;max-width:92ch}
.note{font-size:14px;margin-top:10px;max-width:92ch}h2+.note{margin-top:0}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(230px,1fr));gap:16px;margin:28px 0 0}
.card,figure,.table{background:var(--card);border:1px solid var(--rule);border-radius:12px}
.card{padding:18px 20px}
h3{font-size:16px;margin:24px 0 8px}
.card h3{margin:0;font-size:14px;font-weight:500;color:var(--soft)}
.card .figure{font-size:27px;font-weight:650;letter-spacing:-.02em;line-height:1.3;margin:6px 0 4px;
white-space:nowrap}
.card .from{color:var(--soft);font-weight:450}
main .card .unit{font-size:18px;font-weight:500}
.card .under{font-size:14px;color:var(--soft);margin:0}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr));gap:16px}
figure{margin:0;padding:16px 18px 10px;min-width:0}
figcaption{font-size:15px;font-weight:600}
figure svg{display:block;width:100%;height:auto}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 18px;padding:0;margin:2px 0 8px;font-size:14px}
.legend li{display:flex;align-items:center;gap:7px}
figure .swatch{width:26px;height:10px;flex:none}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--soft)}
svg .grid{stroke:var(--rule)}svg .axis{stroke:var(--soft)}
svg .band{fill:var(--accent);opacity:.1}
polyline{fill:none}polyline,.swatch line{stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
polyline.one,.swatch line.one{stroke-width:2.6}
polyline.one,line.one{stroke:var(--accent)}polyline.two,line.two{stroke:var(--second);stroke-dasharray:7 5}
polyline.three,line.three{stroke:var(--third);stroke-dasharray:1.5 5}
circle.one{fill:var(--accent)}circle.two{fill:var(--second)}circle.three{fill:var(--third)}
.table{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:15px}
th,td{padding:7px 10px;text-align:right;border-top:1px solid var(--rule);font-weight:400}
thead th{border-top:0;color:var(--soft);font-size:13.5px;line-height:1.3;vertical-align:bottom}
tr>:last-child{padding-right:16px}
tbody th,thead tr:first-child>:first-child{text-align:left;padding-left:16px}
tbody th{font-weight:500;white-space:nowrap}
thead .stage{text-align:center;font-weight:600;color:var(--ink)}
.first{border-left:1px solid var(--rule)}
td.after{background:var(--wash);font-weight:600}
tbody.pooled th,tbody.pooled td{font-weight:650}tbody.pooled tr:first-child>*{border-top:2px solid var(--soft)}
.new{font-size:12px;font-weight:600;color:var(--accent);border:1px solid;border-radius:99px;padding:0 7px;
margin-left:6px}
details{margin-top:8px;font-size:14px}summary{cursor:pointer;padding:2px 0}
details .table{margin-top:8px;max-height:420px;overflow:auto}
.left td{text-align:left;overflow-wrap:anywhere}.left thead th{text-align:left}
@media (max-width:560px){main{padding:24px 14px 48px}h1{font-size:25px}h2{margin-top:34px}figure{padding:14px 12px 8px}
.cards{grid-template-columns:1fr;gap:12px}svg text{font-size:15px}.wide{display:none}
table{font-size:12.5px}th,td{padding:7px 4px}
thead th{font-size:12px}tr>:last-child{padding-right:10px}tbody th{white-space:normal}
tbody th,thead tr:first-child>:first-child{padding-left:10px}
.new{margin-left:0;display:inline-block}}
@page{margin:14mm 12mm}
@media print{:root{color-scheme:light;--page:#fff;--card:#fff;--ink:#000;--soft:#4a525b;--rule:#c4c8cc;--accent:#0b6b8f;
--second:#b4540a;--third:#6a4fb3;--wash:#eef4f7}
body{font-size:10.5pt;print-color-adjust:exact;-webkit-print-color-adjust:exact}
main{max-width:none;padding:0}h1{font-size:20pt}h2{font-size:13pt;margin-top:22px}h2,h3,h2+.note{break-after:avoid}
p,.note,.warning{max-width:none}.card,figure,tr,.warning{break-inside:avoid}thead{display:table-header-group}
.cards{grid-template-columns:repeat(auto-fit,minmax(38mm,1fr));margin-top:14px}.card{padding:10px 12px}
.card .figure{font-size:17pt}.charts{grid-template-columns:1fr 1fr}.table{overflow:visible}
table{font-size:9.5pt}th,td{padding:4px 7px}
figure details,summary{display:none}details .table{max-height:none;overflow:visible}
.settings::details-content{content-visibility:visible;display:block}}
"""
