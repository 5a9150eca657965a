import re,subprocess,os,shutil
os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), '..')); os.environ['TSAN_OPTIONS']='atexit_sleep_ms=0:exitcode=66'
inc="-Iinclude -isystem /usr/local/cuda/include"
rts=" ".join(f"bin/rt-st-{f}.o" for f in("cusim_rt","cusim_lt","cusim_nccl"))
def build(mode,out):
    cc,x=("g++","-O1") if mode=="plain" else ("clang++","-O1 -fsanitize=thread")
    return subprocess.run(f"{cc} -x c++ -std=c++17 -g {x} -w -fno-strict-aliasing {inc} -c mut/tests/kernels.cu -o mut/{out}.o && {cc} {x} mut/{out}.o {rts} -o mut/{out} -lpthread -ldl -lrt -rdynamic",shell=True).returncode
def run(b,env={}):
    e=dict(os.environ,**env)
    try: r=subprocess.run([f"mut/{b}"],env=e,capture_output=True,text=True,timeout=120)
    except subprocess.TimeoutExpired: return "hang"
    o=r.stdout+r.stderr
    if "CUSIM ERROR" in o: return "emu"
    if "data race" in o: return "TSan"
    if "FAIL" in o: return "wrong"
    return "-" if r.returncode==0 else f"rc{r.returncode}"
muts=[]
for f in("kernels/common.cuh","kernels/model.cuh"):
    s=open(f).read()
    for m in re.finditer(r"__sync(threads|warp)\(\);",s): muts.append((f,m.start(),m.end(),"del sync"))
print(len(muts),"mutants"); caught={}
for f,a,b,what in muts:
    shutil.rmtree("mut",ignore_errors=True); shutil.copytree("kernels","mut/kernels"); shutil.copytree("tests","mut/tests")
    s=open(f).read(); open("mut/"+f,"w").write(s[:a]+"/*mut*/;"+s[b:]); line=s[:a].count("\n")+1
    if build("plain","p") or build("tsan","t"): print("build failed"); continue
    r={"up":run("p"),"down":run("p",{"CUSIM_ORDER":"down"}),"random":run("p",{"CUSIM_ORDER":"random"}),"greedy":run("p",{"CUSIM_ORDER":"greedy"}),"ctsan":run("t")}
    print(f"{f}:{line} {s[a:b]:18}"," ".join(f"{k}={v}" for k,v in r.items()),flush=True)
