# libraries.sh -- finds CUDA's libraries for programs of a kit; for `source`. It uses `bin`, the folder
# of the programs; `toy`, on for those of the simulated GPU; `python`, a Python or nothing; and say.
# shellcheck shell=bash disable=SC2154

# Prints the folders where a toolkit or PyTorch's wheels may have installed libraries.
library_folders() {
    ldconfig -p 2>/dev/null | sed -n 's/.* => \(.*\)\/[^/]*$/\1/p' | sort -u
    [ -z "$python" ] || timeout 20 "$python" -c 'import sys, glob
for path in sys.path:
    print(*glob.glob(path + "/nvidia/*/lib"), path + "/torch/lib", sep="\n")'
    ls -d "${CUDA_HOME:-/usr/local/cuda}"/lib64 /usr/local/cuda*/lib64 /usr/local/cuda*/targets/x86_64-linux/lib \
        /usr/local/nvidia/lib64 /usr/lib/wsl/lib /usr/lib64 /usr/lib/x86_64-linux-gnu \
        {/usr,/usr/local,/opt/*,/opt/*/.venv,~/.local,~/.venv}/lib/python3*/{site,dist}-packages/nvidia/*/lib 2>/dev/null
}

# Adds to LD_LIBRARY_PATH the libraries that the programs miss; reports those that it finds nowhere.
find_libraries() {
    local missing library folders folder found
    missing=$(find "$bin" -type f -exec ldd {} + 2>/dev/null | sed -n 's/^[[:space:]]*\([^ ]*\) => not found.*/\1/p' | sort -u)
    [ $toy = on ] || ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1 ' || missing+=" libcuda.so.1"
    [ -n "$missing" ] && folders=$(library_folders)
    for library in $missing; do
        found=
        while read -r folder; do
            [ -n "$folder" ] && [ -e "$folder/$library" ] && { found=$folder && break; }
        done <<<"$folders"
        [ -n "$found" ] || found=$(dirname "$(timeout 15 find / -xdev -name "$library" -print -quit 2>/dev/null)")
        if [ "$found" = . ]; then
            say "- $library is nowhere on this machine"
        else
            say "- $library: $found"
            case :${LD_LIBRARY_PATH:-}: in
            *:"$found":*) ;;
            *) export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$found ;;
            esac
        fi
    done
}
