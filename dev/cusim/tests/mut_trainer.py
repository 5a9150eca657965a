# remove each stream/event synchronisation of the trainer, one at a time: is it noticed?
import re,subprocess,os,shutil
os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), '..')); inc="-Iinclude -isystem /usr/local/cuda/include"; rts=" ".join(f"bin/rt-st-{f}.o" for f in("cusim_rt","cusim_lt","cusim_nccl"))
S="-C 32 -T 16 -B 2 -V 128 -L 1 -s 6 -q".split()
def build():
    return subprocess.run(f"g++ -x c++ -std=c++17 -O1 -w -fno-strict-aliasing {inc} -c mut/train/t.cu -o mut/t.o && g++ mut/t.o {rts} -o mut/t -lpthread -ldl -lrt -rdynamic",shell=True).returncode
def run(env={},n=1):
    r=subprocess.run(["mut/t"]+S+["-n",str(n)],env=dict(os.environ,CUSIM_NCCL_TIMEOUT="5",**env),capture_output=True,text=True,timeout=60); o=r.stdout+r.stderr
    m=re.search(r"last loss ([\d.naninf-]+)",o); return ("EMU" if "CUSIM ERROR" in o else m.group(1) if m else f"rc{r.returncode}")
s=open("train/tinygpt.cu").read(); shutil.rmtree("mut",ignore_errors=True); shutil.copytree("kernels","mut/kernels"); os.makedirs("mut/train")
pats=[r"CUDA_CHECK\(cudaStreamWaitEvent\([^;]*;",r"CUDA_CHECK\(cudaEventRecord\([^;]*;",r"CUDA_CHECK\(cudaStreamSynchronize\(st\)\);",r"CUDA_CHECK\(cudaMemsetAsync\([^;]*;",r"NCCL_CHECK\(nccl(?:ReduceScatter|AllReduce|AllGather)\([^;]*;",r"st, G\(WTE\), G\(WPE\)"]
open("mut/train/t.cu","w").write(s); build(); base={k:run(e) for k,e in {"eager":{},"lazy":{"CUSIM_STREAMS":"lazy"},"random":{"CUSIM_STREAMS":"random"}}.items()}; print("unmutated",base)
for p in pats[:-1]:
    for m in re.finditer(p,s):
        open("mut/train/t.cu","w").write(s[:m.start()]+";"+s[m.end():])
        if build(): print("build failed",m.group(0)[:50]); continue
        r={k:run(e) for k,e in {"eager":{},"lazy":{"CUSIM_STREAMS":"lazy"},"random":{"CUSIM_STREAMS":"random","CUSIM_SEED":"3"}}.items()}
        print(f"{s[:m.start()].count(chr(10))+1}: {m.group(0)[:62]:62}", {k:("same" if v==base[k] else v) for k,v in r.items()},flush=True)
