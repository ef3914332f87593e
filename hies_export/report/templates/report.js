(()=>{const heads=JSON.parse(document.getElementById("heads").textContent),out=document.getElementById("head");
const names={score:"score",his:"HIS",entropy:"entropy"};
function show(e){const i=e.target.dataset&&e.target.dataset.i;if(!i)return;const[l,h]=i.split(",").map(Number),m=heads[l];
document.querySelectorAll("rect.on").forEach(r=>r.classList.remove("on"));
document.querySelectorAll(`rect[data-i="${i}"]`).forEach(r=>r.classList.add("on"));
const n=Object.entries(names).filter(([k])=>m[k]).map(([k,v])=>`${v} ${m[k][h]}`);
out.textContent=`layer ${l}, head ${h}: `+[m.cut[h]?"cut":"kept",...n].join(" \u00b7 ")}
document.querySelectorAll(".map").forEach(s=>["pointerover","click"].forEach(t=>s.addEventListener(t,show)))})();
