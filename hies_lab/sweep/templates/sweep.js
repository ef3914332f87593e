/* Pointing at a line or a name shows that method in all charts of its section; a click keeps it. */
document.querySelectorAll("section.drawn").forEach(section=>{let kept=null;
const all=[...section.querySelectorAll("[data-s]")];
function show(name){section.classList.toggle("dim",name!==null);
all.forEach(e=>{const on=e.dataset.s===name;e.classList.toggle("on",on);
if(e.tagName==="BUTTON")e.setAttribute("aria-pressed",String(on&&kept===name))})}
all.forEach(e=>{const name=e.dataset.s;
e.addEventListener("pointerenter",p=>{if(p.pointerType==="mouse")show(name)});
e.addEventListener("pointerleave",p=>{if(p.pointerType==="mouse")show(kept)});
e.addEventListener("click",()=>{kept=kept===name?null:name;show(kept)})})});
